"""Products with weights of published formats, compiled for sm_80 to sm_100: registers, spills, tensor cores.

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
    products = [r for r in reports if r.wants_tensor_core]
    widened = [r for r in products if r.kernel != "_float8_matmul"]
    assert {r.kernel for r in widened} == {"_coded_matmul", "_int8_matmul"}
    assert len(widened) == 3 * 19 + 3
    for arch, tensor_core in ((80, "mma"), (90, "wgmma"), (100, "tcgen05")):
        assert {r.tensor_core for r in widened if r.arch == arch} == {tensor_core}
    of_float8 = [r for r in products if r.kernel == "_float8_matmul"]
    assert len(of_float8) == 3 * 9  # the same kernels for `OTHER_SIZES`
    assert len([r for r in reports if r.kernel == "_quantize_activations"]) == 3 * 4  # two grains, two dtypes
    for arch, tensor_core in ((89, "mma fp8"), (90, "wgmma fp8"), (100, "tcgen05 fp8")):
        assert {r.tensor_core for r in of_float8 if r.arch == arch} == {tensor_core}
    assert all(r.copies_of_16 and not r.copies_of_less for r in of_float8)
    assert max(r.registers for r in products) <= 255
