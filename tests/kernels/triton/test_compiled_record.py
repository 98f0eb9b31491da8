"""The record of compiled kernels: it has all of today's launches under three versions of Triton, and none has faults.

What it has of the version at hand is not compiled again, except for a few launches that must give the same.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import compiled_record
import pytest
from ptx_compile import Job, Launch, Report

UPDATE = "run `make kernels-triton` and see what changed"
# Of one version only, by a few bytes: ptxas and the order of the loads differ from version to version.
SPILLS = {("3.6.0", "fp8, shared", "_decode_kernel"): 4, ("3.9.0", "Llama 3, drafts", "_decode_kernel"): 12}


def one(a: int) -> int:
    return a


def other(a: int) -> int:
    return a


def edited(a: int) -> int:
    return a + 1


edited.__qualname__ = edited.__name__ = "one"


def kernel_of(function: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(__name__=function.__name__, fn=function)


def job(function: Callable[..., Any] = one, arch: int = 90, **constants: int) -> Job:
    return Job("a case", Launch(kernel_of(function), {}, constants, {}, {}), arch, False)


def compiled(job: Job) -> Report:
    return Report(job.case, job.launch.kernel.__name__, job.arch, 32, 0, 1024, "mma", "", job.wants_tensor_core)


JOBS = [job(NUMBER=number) for number in range(8)]


# -- what is compiled again -----------------------------------------------------------------------


def test_only_a_few_known_launches_are_compiled(monkeypatch) -> None:
    known = {compiled_record.key_of(job): compiled_record.measured_of(compiled(job)) for job in JOBS[:7]}
    monkeypatch.setattr(compiled_record, "recorded", lambda: known)
    done: list[Job] = []
    reports = list(compiled_record.reports_of(JOBS, lambda job: done.append(job) or compiled(job)))
    assert reports == [compiled(job) for job in JOBS]
    assert len(done) == compiled_record.NUM_COMPILED_ANEW + 1 and JOBS[7] in done


def test_a_record_that_is_not_true_is_an_error(monkeypatch) -> None:
    known = {compiled_record.key_of(job): compiled_record.measured_of(compiled(job)) for job in JOBS}
    monkeypatch.setattr(compiled_record, "recorded", lambda: known)
    with pytest.raises(RuntimeError, match=r"one: \[33, 0.*run compiled_record.py"):
        list(compiled_record.reports_of(JOBS, lambda job: replace(compiled(job), registers=33)))


def test_every_part_of_a_launch_belongs_to_its_key() -> None:
    launches = [job(), job(other), job(edited), job(arch=80), job(BLOCK=64)]
    assert len({compiled_record.key_of(launch) for launch in launches}) == len(launches)


def test_a_kernels_source_is_its_syntax_with_all_that_it_calls() -> None:
    pytest.importorskip("triton", reason="Triton has wheels for Linux only (2026-11-21)")
    from plait.kernels.triton.attention import kv_loop, prefill

    source = compiled_record.source_of(prefill._prefill_kernel)
    assert compiled_record.source_of(kv_loop.find_slots)[2:-2] in source, "called by what the kernel calls"
    assert "INTERPRETED" in source and "Returns the slots of positions" not in source


def test_only_three_versions_stay(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(compiled_record, "RECORD", tmp_path / "record.json")
    (tmp_path / "record.json").write_text("{}")
    oldest, pinned = compiled_record.oldest_version(), compiled_record.pinned_version()
    for version in ("3.100.0", oldest, pinned, "3.8.1", "3.99.0", "3.100.1"):
        compiled_record.write_record(version, {"a": [version]})
    assert compiled_record.record() == {version: {"a": [version]} for version in (oldest, pinned, "3.100.1")}


# -- what the record says -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed() -> list[dict[str, Any]]:
    """What the record has of today's launches."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only (2026-11-21)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", compiled_record.__file__, "--print"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.fixture(scope="module")
def reports(printed: list[dict[str, Any]]) -> list[tuple[str, Report]]:
    return [(line["version"], Report(**line["report"])) for line in printed if line["report"] is not None]


def test_the_record_has_the_oldest_the_pinned_and_a_newer_version() -> None:
    versions = list(compiled_record.record())
    assert versions[:2] == [compiled_record.oldest_version(), compiled_record.pinned_version()]
    assert len(versions) == 3 and versions == sorted(versions)


def test_the_record_has_exactly_todays_launches_under_each_version(printed: list[dict[str, Any]]) -> None:
    assert {line["version"] for line in printed if line["report"] is None} == set(), UPDATE
    for version, known in compiled_record.record().items():
        assert known.keys() == {line["key"] for line in printed if line["version"] == version}, UPDATE


def test_every_kernel_that_the_host_launches_is_in_the_record(reports: list[tuple[str, Report]]) -> None:
    """A kernel that another one calls is compiled with it."""
    named: dict[str, set[str]] = {}  # by kernel: what it names
    for file in (compiled_record.ROOT / "kernels/triton").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                named[node.name] = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    called = set().union(*named.values())
    assert {report.kernel for _, report in reports} == named.keys() - called


def test_no_kernel_has_faults_under_any_version(reports: list[tuple[str, Report]]) -> None:
    """Among them products that ptxas runs one by one (C7514, C7515)."""
    spills = {(v, r.case, r.kernel): r.spilled_bytes for v, r in reports if r.spilled_bytes and r.case != "faulty"}
    assert spills == SPILLS, UPDATE
    others = [(v, r.case, r.kernel, r.arch, r.faults()) for v, r in reports if r.faults() and not r.spilled_bytes]
    assert others == []
