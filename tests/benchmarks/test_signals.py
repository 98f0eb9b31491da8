"""A benchmark that is told to end leaves no server behind, wherever it stands."""

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

pytestmark = pytest.mark.usefixtures("default_signals")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SILENT = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
ANSWERING = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, file=open(sys.argv[1], "w"), flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        told = {"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}], "usage": {}}
        said = f"data: {json.dumps(told)}\\n\\ndata: [DONE]\\n\\n".encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Answer).serve_forever()
"""
SITTING = """
import asyncio, contextlib, sys
sys.path.insert(0, sys.argv[1])
from server_comparison.servers import Server, started
from server_comparison.signals import unwind_on_signal
import paper_programs
unwind_on_signal()
server = Server("peer", sys.argv[2], "m", sys.argv[3])
async def sit():
    async with started(server):
        print("started", flush=True)
        await asyncio.sleep(600)
if sys.argv[4] == "asyncio":
    asyncio.run(sit())
else:
    with paper_programs._running(server):
        print("started", flush=True)
        import time; time.sleep(600)
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
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
        process.kill()
        process.wait()


def left_of(pids: list[int]) -> list[int]:
    """Those that run still, which end now."""
    left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def pids_in(path: Path, count: int) -> list[int]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if path.exists() and len(told := path.read_text().split()) == count:
            return [int(pid) for pid in told]
        time.sleep(0.02)
    raise AssertionError("the server did not start")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("way", ["asyncio", "runner"])
@pytest.mark.parametrize("answers", [False, True])
def test_servers_end_with_the_benchmark_that_is_told_to(tmp_path, unused_port, number, way, answers) -> None:
    """While one is awaited and while it serves; twice, as `timeout` and an impatient hand do."""
    code, told = tmp_path / "server.py", tmp_path / "pids"
    code.write_text(ANSWERING if answers else SILENT)
    command = f"{sys.executable} {code} {told} {unused_port}"
    url = f"http://127.0.0.1:{unused_port}"
    with running("-c", SITTING, str(BENCHMARKS), url, command, way) as process:
        pids = pids_in(told, 1 + answers)
        if answers:
            assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        time.sleep(0.05)
        process.send_signal(number)
        code = process.wait(60)
        assert (code, left_of(pids)) == (128 + number, [])


def test_a_script_ends_what_it_started() -> None:
    with running(str(BENCHMARKS / "serving_overhead.py"), "--clock", "1", "--refusals") as process:
        children = []
        while len(children) < 2 and process.poll() is None:
            children = psutil.Process(process.pid).children()
            time.sleep(0.02)
        assert len(children) == 2, "a runtime and a server"
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        assert (code, left_of([each.pid for each in children])) == (128 + signal.SIGTERM, [])


@pytest.mark.parametrize("script", ["cpu.py", "paper_programs.py", "serving_overhead.py", "serving_rejections.py"])
def test_scripts_that_start_servers_listen(script) -> None:
    source = (BENCHMARKS / script).read_text()
    assert "    unwind_on_signal()\n" in source


def test_a_signal_that_was_ignored_stays_so() -> None:
    code = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += "from server_comparison.signals import unwind_on_signal; unwind_on_signal()\n"
    code += "os.kill(os.getpid(), signal.SIGINT); print('here')"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        timeout=60,
        check=True,
    )
    assert told.stdout == b"here\n"
