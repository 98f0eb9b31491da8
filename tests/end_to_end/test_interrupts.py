"""A second Ctrl-C, while the runtime ends, leaves no traceback, no process and no directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from runtime_helpers import wait_until

pytestmark = pytest.mark.usefixtures("starts_small_model")

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
    assert errors == "" and wait_until(lambda: not psutil.pid_exists(pid))
    assert not list(tmp_path.glob("plait-*"))
