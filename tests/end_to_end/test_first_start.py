"""The first start compiles kernels: it says so, and no compiling process outlives the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from runtime_helpers import wait_until


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compiling_is_announced_and_ends_with_the_program(number, tmp_path) -> None:
    """SIGINT goes to the process group, as Ctrl-C sends it; the others to the program alone."""
    start = "from plait.runtime.process.runtime import Runtime\nRuntime(device='cpu', max_pages=100)"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", start], stdout=pipe, stderr=pipe, env=environment, text=True, start_new_session=True
    ) as program:
        try:
            assert any("compiling kernels" in line for line in program.stderr)  # behind "loading" on a busy machine
            owner = psutil.Process(program.pid)
            assert wait_until(lambda: len(_compilers(owner)) == 1, 60)
            processes = owner.children(recursive=True)
            if number == signal.SIGINT:
                os.killpg(program.pid, number)
            else:
                program.send_signal(number)
            assert wait_until(lambda: not any(process.is_running() for process in processes), 60)
        finally:
            os.killpg(program.pid, signal.SIGKILL)


def _compilers(owner: psutil.Process) -> list[psutil.Process]:
    return [child for child in owner.children(recursive=True) if "plait.kernels.cpu.precompile" in child.cmdline()]
