"""`plait serve` as a user starts it: a process with the embedded model on a free port, with its log in a file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import httpx
import psutil
from common.processes import end, resident_mib, runtime_of
from faults.figures import Figure, none_of, wait_until

KEYS = ("first-key", "second-key")
CANARIES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True},
    {"prompt": "A list of animals:", "max_tokens": 16, "temperature": 1, "seed": 7},
    {"prompt": "The year is ", "max_tokens": 8, "regex": "[0-9]{4}"},
]


class Server:
    """A server process and its runtime, with the log in a file."""

    def __init__(self, process: subprocess.Popen[str], address: str, log: Path, key: str) -> None:
        self.process, self.address, self.log = process, address, log
        self.port = int(address.rpartition(":")[2])
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=address, headers=headers, timeout=60, verify=False)
        self.own = psutil.Process(process.pid)

    def runtime(self) -> psutil.Process:
        return runtime_of(self.own)

    def memory(self) -> dict[str, float]:
        """Resident memory in MiB: of the HTTP process, the runtime without its KV pool, the pool, and the compilers.

        The pool is reserved at the start. The kernel gives it memory when a page is used for the first time.
        """
        runtime = self.runtime()
        compilers = sum(child.memory_info().rss for child in runtime.children())
        pool, rest = resident_mib(Path(f"/proc/{runtime.pid}/smaps").read_text())
        http = self.own.memory_info().rss
        return {"http": http / 2**20, "runtime": rest, "KV pool": pool, "compile": compilers / 2**20}

    def is_idle(self) -> bool:
        counts = self.http.get("/status").json()["runtime"]
        return not (counts["running_calls"] or counts["waiting_calls"] or counts["used_pages"])

    def is_ready(self) -> bool:
        return self.http.get("/ready").status_code == 200

    def wait_ready(self, timeout_s: float = 60) -> float:
        """Returns the seconds until the server is ready."""
        return wait_until(self.is_ready, timeout_s)

    def complete(self, prompt: str = "One, two,", max_tokens: int = 2, **fields: Any) -> httpx.Response:
        body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json=body)

    def canaries(self) -> list[str]:
        """The answers to fixed requests. They do not change."""
        answers = [self.complete(**body) for body in CANARIES]
        return [answer.json()["choices"][0]["text"] if answer.is_success else answer.text for answer in answers]

    def same_answers(self, fault: str, expected: list[str]) -> Figure:
        """Compares the answers to the fixed requests with those that they had."""
        return none_of(fault, [] if self.canaries() == expected else ["differ"], len(CANARIES), "differ")

    def num_tracebacks(self) -> int:
        """Tracebacks in the log, without those of failures that `injection/` caused."""
        lines = self.log.read_text(errors="replace").splitlines()
        return sum(line.startswith("Traceback") for line in lines) - sum(
            line.startswith("sitecustomize.InjectedFault: ") for line in lines
        )


@contextlib.contextmanager
def serve(
    *options: str,
    keys: Sequence[str] = (),
    folder: Path | None = None,
    log: IO[Any] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Runs `plait serve` for the block, with `environment` added. Everything that it started has ended afterwards.

    keys: of its clients; `Server.http` has the first. folder: its TMPDIR.
    """
    with tempfile.TemporaryDirectory(prefix="plait-faults-", ignore_cleanup_errors=True) as name:
        own_folder = Path(name)
        command = [sys.executable, "-P", "-m", "plait.cli", "serve", "--port=0", *options]
        if keys:
            (own_folder / "keys").write_text("".join(f"{key.split('-')[0]} {key}\n" for key in keys))
            command.append(f"--api-key-file={own_folder / 'keys'}")
        with (own_folder / "log").open("w") as log_file:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log or log_file,
                text=True,
                env={**os.environ, "TMPDIR": str(folder or own_folder), **environment},
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("plait serves at "):
                raise RuntimeError(f"plait serve did not start: {(own_folder / 'log').read_text()[-500:]}")
            server = Server(process, line.split()[-1], own_folder / "log", next(iter(keys), ""))
            with contextlib.closing(server.http):
                server.complete()  # the first request waits for the model
                yield server
        finally:
            end(process, 5)
