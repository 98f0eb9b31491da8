"""A child process: how it ends, what is said of it, and that it ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from waiting import is_running, wait_until

from plait.host.child_process import ChildProcess, last_line

# Started as `python -P -m timeit -n1 -r1 CODE`, a module of the standard library that runs a statement.
ENDS_WITH_OWNER = "import os, time; from plait.host.owner import watch_owner; watch_owner(lambda: os._exit(3)); {}"
SLEEPS = ENDS_WITH_OWNER.format("time.sleep(600)")


def started(code: str, **options) -> ChildProcess:
    return ChildProcess("timeit", "-n1", "-r1", code, stderr=subprocess.DEVNULL, **options)


@pytest.mark.parametrize("channel", [False, True])
def test_it_ends_when_its_owner_hangs_up(channel: bool) -> None:
    child = started(SLEEPS, channel=channel)
    assert child.status() is None
    child.hang_up()
    assert child.status(60.0) == "exit code 3"
    child.end(0.0)
    child.end(0.0)


def test_one_that_does_not_end_is_killed() -> None:
    child = started("import time; time.sleep(600)")
    child.end(0.1)
    assert child.status() == "killed by signal 9" and child.stdin.closed


def test_a_block_that_takes_too_long_kills_it() -> None:
    child = started("import time; time.sleep(600)")
    with child.killed_after(0.05) as is_killed:
        assert child.status(60.0) == "killed by signal 9"
    assert is_killed.is_set()
    child.end(0.0)
    other = started("pass")
    with other.killed_after(600.0) as is_killed:
        other.status(60.0)
    assert not is_killed.is_set()
    other.end(0.0)


@pytest.mark.parametrize("channel", [False, True])
def test_it_ends_with_a_killed_owner_that_had_forked(channel: bool) -> None:
    """The forked process has no copy of the pipe or of the channel, and does not end the child."""
    code = f"""
import os, signal, time
from plait.host.child_process import ChildProcess
child = ChildProcess("timeit", "-n1", "-r1", {SLEEPS!r}, channel={channel})
fork = os.fork()
if fork == 0:
    assert child.status() is None and not child.is_owned
    time.sleep(600)
time.sleep(0.1)
print(child.pid, fork, child.status(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        pid, fork, status = owner.stdout.readline().split()
        assert owner.wait(60) == -signal.SIGKILL and status == "None"
    try:
        assert wait_until(lambda: not is_running(int(pid)))
        assert psutil.pid_exists(int(fork))
    finally:
        os.kill(int(fork), signal.SIGKILL)


def test_a_process_forked_while_a_thread_reads_the_output() -> None:
    """The thread holds the lock of the output's buffer, which the forked process must not wait for."""
    code = f"""
import os, threading, time
from plait.host.child_process import ChildProcess
child = ChildProcess("timeit", "-n1", "-r1", {SLEEPS!r}, stdout=-1)
threading.Thread(target=child.stdout.read, daemon=True).start()
time.sleep(0.2)
fork = os.fork()
if fork == 0:
    os._exit(7 if child.stdin.closed and child.stdout.closed else 8)
os._exit(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
"""
    with subprocess.Popen([sys.executable, "-c", code], process_group=0) as owner:
        try:
            assert owner.wait(60) == 7
        finally:
            if owner.returncode is None:
                os.killpg(owner.pid, signal.SIGKILL)  # with the forked process


def test_one_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        started("pass", channel=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_last_line_of_a_log(tmp_path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"first\n" + b"\xff" + b"x" * 300 + b"\n\n")
    assert last_line(log) == "\ufffd" + "x" * 199
