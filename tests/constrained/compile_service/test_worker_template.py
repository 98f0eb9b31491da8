"""The template and a worker: what they do with requests of the pool, without processes."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace

import pytest

from plait.constrained import Regex, Vocabulary
from plait.constrained.compile_service import worker, worker_template
from plait.constrained.compile_service.worker_messages import CompileJob, CompileRefused, send_fork, send_reap


def test_a_killed_worker_that_ends_slowly_delays_no_other(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the lowest priority needs the processor to end, as to run."""
    pids, events, may_end = iter((11, 12, 13)), list[object](), False

    def waitpid(pid: int, flags: int) -> tuple[int, int]:
        assert flags == os.WNOHANG or may_end, "it blocks"
        events.append(f"asks for {pid}" if flags else f"waits for {pid}")
        return (pid if may_end else 0), 0

    def fork(*_: object) -> int:
        nonlocal may_end
        pid = next(pids)
        events.append(f"forks {pid}")
        may_end = pid == 13
        return pid

    monkeypatch.setattr(worker_template, "_fork_worker", fork)
    monkeypatch.setattr(
        worker_template, "os", SimpleNamespace(waitpid=waitpid, kill=lambda *_: None, WNOHANG=os.WNOHANG)
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_fork(ours, theirs)
        send_reap(ours, 11)
        send_fork(ours, theirs)
        send_fork(ours, theirs)
        send_reap(ours, 12)
        ours.shutdown(socket.SHUT_WR)
        worker_template.serve(theirs, small, 1 << 20)
    assert events == [
        *("forks 11", "asks for 11", "asks for 11", "forks 12", "asks for 11", "forks 13"),
        *("asks for 11", "asks for 12", "waits for 13"),
    ]


def test_a_worker_reports_the_processor_time_of_a_job(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a small constraint takes long by the clock, and its grammar is still built at once."""

    def wait(*_: object) -> CompileRefused:
        time.sleep(0.3)
        return CompileRefused("no", None)

    monkeypatch.setattr(worker, "_compile", wait)
    monkeypatch.setattr(worker, "signal", SimpleNamespace(setitimer=lambda *_: None, ITIMER_REAL=0))
    assert worker._run_job(CompileJob(Regex("a"), 60.0), small).spent_s < 0.1
