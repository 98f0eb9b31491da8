"""`plait serve` as a process, with its runtime process and its log."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import httpx
import psutil
from waiting import wait_until

LONG = {
    "model": "default",
    "prompt": "One, two,",
    "max_tokens": 900_000,
    "ignore_eos": True,
    "stream": True,
}


class Served:
    """A server process, its address, and the lines it logged. `arguments`: the model, if any, and options."""

    def __init__(self, *arguments: object, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-P", "-m", "plait.cli", "serve", "--port", "0"]
        command += map(str, arguments)
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        line = self.process.stdout.readline()
        assert line.startswith("plait serves at "), self.process.stderr.read()
        self.address = line.split()[-1]
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def runtime(self) -> psutil.Process:
        (runtime,) = psutil.Process(self.process.pid).children()
        return runtime

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, timeout=60)

    def post(self, body) -> httpx.Response:
        return httpx.post(f"{self.address}/v1/completions", json=body, timeout=60)

    def streaming(self) -> tuple[threading.Thread, list[str]]:
        """Starts to stream a long answer in a thread. Returns the thread and its events."""
        events: list[str] = []

        def read() -> None:
            with httpx.stream("POST", f"{self.address}/v1/completions", json=LONG, timeout=60) as answer:
                events.extend(answer.iter_lines())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert wait_until(lambda: any(request["tokens"] > 2 for request in self.get("/status").json()["requests"]))
        return reader, events

    def wait(self, timeout_s: float = 60) -> int:
        exit_code = self.process.wait(timeout_s)
        self._reader.join(60)
        return exit_code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._reader.join(60)
        self.process.stderr.close()
