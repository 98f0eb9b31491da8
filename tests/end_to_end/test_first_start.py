"""The first start compiles kernels: it says so, and no compiling process outlives the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from waiting import is_running, wait_until


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compiling_is_announced_and_ends_with_the_program(number, tmp_path) -> None:
    """SIGINT goes to the process group, as Ctrl-C sends it; the others to the program alone."""
    start = "from plait.runtime.process.runtime import Runtime\nRuntime(device='cpu', max_pages=100)"
    environment = os.environ | {"PLAIT_KERNEL_CACHE_DIR": str(tmp_path)}
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
            assert wait_until(lambda: not any(is_running(process.pid) for process in processes), 60)
        finally:
            os.killpg(program.pid, signal.SIGKILL)


def _compilers(owner: psutil.Process) -> list[psutil.Process]:
    return [child for child in owner.children(recursive=True) if "plait.kernels.cpu.precompile" in child.cmdline()]


def test_the_first_answer_comes_before_kernels_are_optimized_and_those_that_follow_are_the_same(tmp_path) -> None:
    """The compiling process is stopped after it has sent what it compiled quickly, until the first answer is there."""
    program = f"""
import os, signal, time
import psutil
from pathlib import Path
from plait import Runtime, function, gen
@function
def story(s):
    s += "Once upon a time" + gen("text", max_tokens=16)
with Runtime(device="cpu", max_pages=256) as runtime:
    children = psutil.Process().children(recursive=True)
    (compiler,) = [child for child in children if "plait.kernels.cpu.precompile" in child.cmdline()]
    compiler.suspend()
    folder = Path({str(tmp_path)!r}) / "plait-kernels"
    assert not list(folder.glob("decoder-*.o")) and list(folder.glob("quick-decoder-*.o"))
    first = story.run(backend=runtime, temperature=0)["text"]
    compiler.resume()
    while not list(folder.glob("decoder-*.o")) or compiler.is_running():
        time.sleep(0.05)
    assert not list(folder.glob("quick-*"))
    assert story.run(backend=runtime, temperature=0)["text"] == first
"""
    environment = os.environ | {"PLAIT_KERNEL_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=120)
