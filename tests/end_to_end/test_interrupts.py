"""Signals to a terminal's process group, as of Ctrl-C, leave no process and no directory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from waiting import is_running, wait_until

pytestmark = pytest.mark.usefixtures("starts_small_model", "default_signals")

PROGRAM = """
import os, signal, subprocess
from plait.lang.backends.default_backend import configure_embedded, resolve_client

configure_embedded(progress=False, max_pages=100)
pid = resolve_client().model.server_pid
os.kill(pid, signal.SIGSTOP)  # as in a long step: it does not end within the time that shutdown waits
wait = subprocess.Popen.wait

def report_and_wait(process, timeout=None):
    print(pid, flush=True)
    return wait(process, timeout)

subprocess.Popen.wait = report_and_wait
"""


def test_a_second_ctrl_c_ends_the_wait_for_the_runtime(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) as process:
        try:
            pid = int(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert errors == "" and wait_until(lambda: not is_running(pid))
    assert not list(tmp_path.glob("plait-*"))


START = """
import resource, signal, sys
from plait.runtime.process import runtime

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)  # nohup ignores one of them
send = runtime.Runtime._send_worker_args

def send_and_report(self, *args):
    send(self, *args)
    print(self._process.pid, flush=True)

if sys.argv[1] == "starting":
    runtime.Runtime._send_worker_args = send_and_report
r = runtime.Runtime(progress=False, max_pages=100)
print(r.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("phase", ["starting", "serving"])
def test_a_signal_to_the_group_leaves_nothing(phase, tmp_path):
    """One program for each signal, side by side. `starting`: the runtime process has its arguments, and may not have
    read them yet."""
    command = [sys.executable, "-c", START, phase]
    pipes = {"stdin": -1, "stdout": -1, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:
        programs = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            folder = tmp_path / number.name
            folder.mkdir()
            environment = {**os.environ, "TMPDIR": str(folder)}
            process = subprocess.Popen(command, env=environment, **pipes, start_new_session=True)
            programs[number] = folder, stack.enter_context(process)
        for number, (folder, process) in programs.items():
            pid = int(process.stdout.readline())
            os.killpg(process.pid, number)
            assert process.wait(60) == -number, number
            assert wait_until(lambda pid=pid: not is_running(pid)), number
            assert not list(folder.glob("plait-*")), number
