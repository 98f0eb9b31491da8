"""Every attention kernel is compiled for sm_80 and sm_90: no register spills, shared memory that fits, tensor cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only (2026-11-21)")
from attention_launches import OTHER_SIZES, SPILLING_CASE
from ptx_compile import Report, compile_file

pytestmark = pytest.mark.timeout(900)  # compilers that take a minute of a free processor
CASES = Path(__file__).parents[3] / "support" / "kernels" / "attention_launches.py"


@pytest.fixture(scope="module")
def compiled() -> list[Report]:
    return compile_file(CASES)


@pytest.fixture(scope="module")
def reports(compiled: list[Report]) -> list[Report]:
    return [each for each in compiled if each.case != SPILLING_CASE]


def test_a_kernel_that_has_every_fault_is_found_out(compiled):
    [report] = [each for each in compiled if each.case == SPILLING_CASE]
    found = replace(report, tensor_core="").faults()
    assert [fault.split()[0] for fault in found] == ["spills", "needs", "does"], report
    assert {each.tensor_core for each in compiled if each.kernel == "_merge_kernel"} == {""}


def test_no_kernel_has_faults(reports):
    found = [f"{r.case}, {r.kernel} for sm_{r.arch}: {fault}" for r in reports for fault in r.faults()]
    assert not found, "\n".join(found)


def test_every_kernel_is_there_for_both_chips(reports):
    seen = {(r.kernel, r.arch) for r in reports}
    kernels = {"_plan_kernel", "_decode_kernel", "_merge_kernel", "_prefill_kernel", "_shared_prefix_kernel"}
    kernels.add("_rope_write_kv_kernel")
    assert {(kernel, arch) for kernel in kernels for arch in (80, 90)} <= seen


def test_hoppers_prompts_and_prefixes_use_wgmma(reports):
    slow = [
        r.case
        for r in reports
        if r.arch == 90 and r.kernel in ("_prefill_kernel", "_shared_prefix_kernel") and r.tensor_core != "wgmma"
    ]
    assert {case.partition(",")[0] for case in slow} <= {"float32"}


def test_three_decoding_programs_share_a_hopper_multiprocessor(reports):
    """What the plan counts on, for the head layout of Llama 3: 227 KB and 65,536 registers, 128 threads each."""
    [decode] = [r for r in reports if (r.case, r.kernel, r.arch) == ("Llama 3", "_decode_kernel", 90)]
    assert 3 * (decode.shared_bytes + 1024) <= 227 * 1024 and 3 * 128 * decode.registers <= 65536


def test_loads_run_ahead_of_products(reports):
    """Tiles come by asynchronous copies, 16 bytes at a time; of 8-bit caches some come by 8, and int8's scales by 4."""
    matrix = [r for r in reports if r.kernel in ("_decode_kernel", "_prefill_kernel", "_shared_prefix_kernel")]
    assert matrix and all(r.copies_of_16 for r in matrix)
    assert not [r.case for r in matrix if r.copies_of_less and not r.case.count("8")]


def test_no_batch_needs_kernels_of_its_own(reports):
    """Numbers that change from batch to batch are no constants: batches of any size run the same code."""
    assert not [(r.case, r.kernel) for r in reports if r.case.startswith(OTHER_SIZES)]
