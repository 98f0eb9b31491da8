"""Ctrl-C ends the process at once, whatever the bodies and tools of its programs do."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from plait.lang.daemon_threads import DaemonThreads

BODY = """
import asyncio, sys, time
import plait
from plait.testing import Scripted, always, call

def slow(town: str = "Ulm") -> str:
    sys.stdout.write("sleeps\\n")
    sys.stdout.flush()
    time.sleep(600)
    return town

@plait.function
def plain(s, i=0):
    time.sleep(0.3)  # CPython misses a signal between the main thread's last bytecode and its blocking system call
    slow()

@plait.function
async def calls_a_tool(s):
    s += "A call: " + plait.gen("step", tools=[slow])
    result = await s.call("step", timeout=0.2)
    print(result.error, flush=True)

async def gather():
    await asyncio.gather(*(plain.arun(i) for i in range(3)))

answers = {"step": always(call("slow", town="Ulm"))}
with Scripted(answers, chat_template=None):
"""


@pytest.mark.parametrize(
    "run",
    [
        "plain.run()",
        "plain.run_batch([{'i': i} for i in range(3)])",
        "list(plain.run_batch([{'i': i} for i in range(3)], generator_style=True))",
        "asyncio.run(plain.arun())",
        "asyncio.run(gather())",
    ],
)
def test_ctrl_c_does_not_wait_for_bodies(default_signals, run):
    with subprocess.Popen([sys.executable, "-c", BODY + "    " + run], stdout=subprocess.PIPE, stderr=-1) as process:
        try:
            assert process.stdout.readline() == b"sleeps\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT and errors.endswith(b"KeyboardInterrupt\n")


def test_the_end_of_a_program_does_not_wait_for_a_tool_that_timed_out():
    code = BODY + "    asyncio.run(calls_a_tool.arun())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "sleeps\nthe tool slow did not end within 0.2 s\n"


def test_threads_run_what_waits_and_cancel_what_has_not_begun():
    threads, order = DaemonThreads(2, "test"), []
    results = [threads.submit(order.append, i) for i in range(50)]
    assert [result.result(60) for result in results] == [None] * 50 and sorted(order) == list(range(50))
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(60)
    release, started = threading.Event(), threading.Barrier(3)
    running = [threads.submit(lambda: started.wait(60) + release.wait(60)) for _ in range(2)]
    waiting = threads.submit(order.clear)
    started.wait(60)
    threads.shutdown(cancel_futures=True)
    release.set()
    assert all(result.result(60) is not None for result in running) and waiting.cancelled() and order
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(len, "")
