"""Products with weights of published formats, compiled for sm_80, sm_90 and sm_100: registers, spills, tensor cores.

A kernel that the compiler empties, as Triton 3.7.1 does with some tiles on sm_100, has no tensor cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ptx_compile import compile_file

pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a busy machine
CASES_FILE = Path(__file__).parents[4] / "tests/support/kernels/published_launches.py"


def test_no_product_spills_registers_or_lacks_tensor_cores() -> None:
    reports = compile_file(CASES_FILE)
    assert [(r.case, r.kernel, r.arch, fault) for r in reports for fault in r.faults()] == []
    assert {r.arch for r in reports if r.wants_tensor_core} == {80, 90, 100}
    products = [r for r in reports if r.wants_tensor_core]
    assert {r.kernel for r in products} == {"_int4_matmul", "_int8_matmul", "_gguf_matmul"}
    assert len(products) == 3 * 19 + 3
    for arch, tensor_core in ((80, "mma"), (90, "wgmma"), (100, "tcgen05")):
        assert {r.tensor_core for r in products if r.arch == arch} == {tensor_core}
    assert max(r.registers for r in products) <= 255
