"""The Triton kernels other than attention, compiled for sm_80 and sm_90: no register spills, use of tensor cores."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ptx_compile import ARCHITECTURES, Report, compile_file

pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a busy machine
ROOT = Path(__file__).parents[3]
FILES = [
    "norm",
    "activation",
    "sampling/vocab_chunks",
    "sampling/logit_adjustments",
    "sampling/sampler",
    "sampling/threshold_search",
    "sampling/logprobs",
    "linear/coded_matmul",
    "linear/quantized_matmul",
    "linear/quantized_linear",
    "linear/grouped_matmul",
    "linear/low_rank",
]
SMALL_TILES = ("_shrink",)  # of 16 ranks; wgmma has 64 rows at least


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_file(ROOT / "tests/support/kernels/operator_launches.py")


def launched_kernels() -> set[str]:
    """The names of the @triton.jit functions that FILES launch."""
    names = set()
    for file in FILES:
        tree = ast.parse((ROOT / f"kernels/triton/{file}.py").read_text())
        jitted = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
        used = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
        }
        names |= jitted & used
    return names | {"_coded_matmul", "_int8_matmul"}  # launched through a variable


def test_every_kernel_is_compiled_for_every_architecture(reports: list[Report]) -> None:
    for arch in ARCHITECTURES:
        assert {report.kernel for report in reports if report.arch == arch} == launched_kernels()


def test_no_kernel_has_faults(reports: list[Report]) -> None:
    assert [(r.case, r.kernel, r.arch, fault) for r in reports for fault in r.faults()] == []
    assert sum(report.wants_tensor_core and report.arch == 90 for report in reports) >= 2 * 8
    assert sum(report.wants_tensor_core and report.arch == 80 for report in reports) >= 6
    large = [r for r in reports if r.wants_tensor_core and r.arch == 90 and r.kernel not in SMALL_TILES]
    assert {r.tensor_core for r in large} == {"wgmma"}


def test_faults_are_reported() -> None:
    good = dict(case="c", kernel="k", arch=90, registers=32, spilled_bytes=0, shared_bytes=1024, tensor_core="mma")
    good["serialized"] = ""
    assert Report(**good, wants_tensor_core=True).faults() == []
    for bad in ({"spilled_bytes": 4}, {"shared_bytes": 300_000}, {"tensor_core": ""}, {"serialized": "C7515"}):
        assert len(Report(**(good | bad), wants_tensor_core=True).faults()) == 1
