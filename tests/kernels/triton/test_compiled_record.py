"""The record of compiled kernels: what it knows is not compiled again, except for a few that must give the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import compiled_record
import pytest
from ptx_compile import Job, Launch, Report


def job(name: str, source: str = "source", arch: int = 90, **constants: int) -> Job:
    return Job("a case", Launch(SimpleNamespace(__name__=name, cache_key=source), {}, constants, {}, {}), arch, False)


def compiled(job: Job) -> Report:
    return Report(job.case, job.launch.kernel.__name__, job.arch, 32, 0, 1024, "mma", job.wants_tensor_core)


JOBS = [job(f"kernel_{number}") for number in range(8)]


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
    with pytest.raises(RuntimeError, match=r"kernel_\d: \[33, 0.*run compiled_record.py"):
        list(compiled_record.reports_of(JOBS, lambda job: replace(compiled(job), registers=33)))


def test_every_part_of_a_launch_belongs_to_its_key() -> None:
    launches = [job("k"), job("other"), job("k", "edited"), job("k", arch=80), job("k", BLOCK=64)]
    assert len({compiled_record.key_of(launch) for launch in launches}) == len(launches)


def test_the_record_is_of_the_pinned_version() -> None:
    """Another version compiles everything, which takes minutes."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only (2026-11-21)")
    constraints = (compiled_record.FOLDER.parents[2] / "constraints.txt").read_text().splitlines()
    version = next(line.split("==")[1] for line in constraints if line.startswith("triton=="))
    assert f'"triton": "{version}"' in compiled_record.RECORD.read_text()
