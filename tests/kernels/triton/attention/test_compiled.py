"""The attention kernels, compiled for sm_80 and sm_90: no register spills, shared memory, use of tensor cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only (2026-11-21)")
from attention_launches import FAULTY_CASE, OTHER_SIZES
from ptx_compile import Report, compile_file

pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a busy machine
CASES = Path(__file__).parents[3] / "support" / "kernels" / "attention_launches.py"


@pytest.fixture(scope="module")
def compiled() -> list[Report]:
    return compile_file(CASES)


@pytest.fixture(scope="module")
def reports(compiled: list[Report]) -> list[Report]:
    return [report for report in compiled if report.case != FAULTY_CASE]


def test_a_faulty_kernel_is_reported(compiled):
    [report] = [report for report in compiled if report.case == FAULTY_CASE]
    faults = replace(report, tensor_core="").faults()
    assert [fault.split()[0] for fault in faults] == ["spills", "needs", "does"], report
    assert {report.tensor_core for report in compiled if report.kernel == "_plan_kernel"} == {""}


def test_no_kernel_has_faults(reports):
    faults = [f"{r.case}, {r.kernel} for sm_{r.arch}: {fault}" for r in reports for fault in r.faults()]
    assert not faults, "\n".join(faults)


def test_every_kernel_is_compiled_for_both_architectures(reports):
    compiled = {(r.kernel, r.arch) for r in reports}
    kernels = {"_plan_kernel", "_decode_kernel", "_prefill_kernel", "_shared_prefix_kernel"}
    kernels.add("_rope_write_kv_kernel")
    assert {(kernel, arch) for kernel in kernels for arch in (80, 90)} <= compiled


def test_prompts_and_shared_prefixes_use_wgmma_on_sm_90(reports):
    without_wgmma = [
        r.case
        for r in reports
        if r.arch == 90 and r.kernel in ("_prefill_kernel", "_shared_prefix_kernel") and r.tensor_core != "wgmma"
    ]
    assert {case.partition(",")[0] for case in without_wgmma} <= {"float32"}


def test_three_decode_programs_fit_one_sm_90_multiprocessor(reports):
    """For Llama 3's heads, as the split-KV plan assumes: 227 KB and 65,536 registers, 128 threads per program."""
    [decode] = [r for r in reports if (r.case, r.kernel, r.arch) == ("Llama 3", "_decode_kernel", 90)]
    assert 3 * (decode.shared_bytes + 1024) <= 227 * 1024 and 3 * 128 * decode.registers <= 65536


def test_tiles_are_loaded_by_asynchronous_copies(reports):
    """Copies have 16 bytes; 8-bit caches also use copies of 8 bytes, and the scales of int8 copies of 4."""
    matrix = [r for r in reports if r.kernel in ("_decode_kernel", "_prefill_kernel", "_shared_prefix_kernel")]
    assert matrix and all(r.copies_of_16 for r in matrix)
    assert not [r.case for r in matrix if r.copies_of_less and not r.case.count("8")]


def test_batches_of_other_sizes_run_the_same_kernels(reports):
    """Kernels are not specialized on values that change with the batch, see `do_not_specialize`."""
    assert not [(r.case, r.kernel) for r in reports if r.case.startswith(OTHER_SIZES)]
