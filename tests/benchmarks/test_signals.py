"""A terminated benchmark ends the servers that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import is_running

pytestmark = pytest.mark.usefixtures("default_signals")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SILENT_SERVER = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
ANSWERING_SERVER = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, file=open(sys.argv[1], "w"), flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        chunk = {"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}], "usage": {}}
        events = f"data: {json.dumps(chunk)}\\n\\ndata: [DONE]\\n\\n".encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(events)))
        self.end_headers()
        self.wfile.write(events)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Answer).serve_forever()
"""
BENCHMARK = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from common.signals import unwind_on_signal
from server_comparison.servers import Server, started
unwind_on_signal()
async def measure():
    print("started", flush=True)
    await asyncio.sleep(600)
with started(Server("peer", sys.argv[2], "m", sys.argv[3])):
    asyncio.run(measure())
"""


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def kill_running(pids: list[int]) -> list[int]:
    """Kills the processes that are still running after 10 s, and returns them. One that was killed ends a bit later."""
    deadline = time.monotonic() + 10
    while running := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return running


def wait_for_pids(path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and len(pids := path.read_text().split()) == count:
            return [int(pid) for pid in pids]
        time.sleep(0.02)
    raise AssertionError("the server did not start")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_ready", [False, True])
def test_a_terminated_benchmark_ends_its_server(tmp_path, unused_port, number, is_ready) -> None:
    """While the server starts and while it serves. The signal is sent twice, as by an impatient user."""
    server, pid_file = tmp_path / "server.py", tmp_path / "pids"
    server.write_text(ANSWERING_SERVER if is_ready else SILENT_SERVER)
    command = f"{sys.executable} {server} {pid_file} {unused_port}"
    url = f"http://127.0.0.1:{unused_port}"
    with running("-c", BENCHMARK, str(BENCHMARKS), url, command) as process:
        pids = wait_for_pids(pid_file, 1 + is_ready)
        if is_ready:
            assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        time.sleep(0.05)
        process.send_signal(number)
        code = process.wait(60)
        assert (code, kill_running(pids)) == (128 + number, [])


def test_scripts_that_start_servers_handle_signals() -> None:
    for script in ("cpu.py", "faults/all.py"):
        assert "    unwind_on_signal()\n" in (BENCHMARKS / script).read_text()


def test_an_ignored_signal_stays_ignored() -> None:
    code = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += "from common.signals import unwind_on_signal; unwind_on_signal()\n"
    code += "os.kill(os.getpid(), signal.SIGINT); print('here')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        timeout=60,
        check=True,
    )
    assert result.stdout == b"here\n"
