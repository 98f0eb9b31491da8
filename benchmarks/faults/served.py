"""`plait serve` as a user starts it: a process with the embedded model on a free port, with its log in a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import httpx
import psutil
from common.processes import end, resident_mib, runtime_of
from faults.figures import Figure, none_of, wait_until

AUTOGROUP = Path("/proc/self/autogroup")
KEYS = ("first-key", "second-key")
CANARIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "A list of animals:", "max_tokens": 16, "temperature": 1, "seed": 7}),
    ("/v1/completions", {"prompt": "The year is ", "max_tokens": 8, "temperature": 0, "regex": "[0-9]{4}"}),
]


class Server:
    """A server process and its runtime. `folder` is its TMPDIR, which holds the runtime's sockets."""

    def __init__(self, process: subprocess.Popen[str], address: str, folder: Path, log: Path, key: str) -> None:
        self.process, self.address, self.folder, self.log, self.key = process, address, folder, log, key
        self.port = int(address.rpartition(":")[2])
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=address, headers=headers, timeout=60, verify=False)
        self.own = psutil.Process(process.pid)

    def runtime(self) -> psutil.Process:
        return runtime_of(self.own)

    def compilers(self) -> list[psutil.Process]:
        return self.runtime().children()

    def memory(self) -> dict[str, float]:
        """Resident memory in MiB: of the HTTP process, the runtime without its KV pool, the pool, and the compilers.

        The pool is reserved at the start. The kernel gives it memory when a page is used for the first time.
        """
        runtime = self.runtime()
        compilers = sum(child.memory_info().rss for child in runtime.children())
        pool, rest = resident_mib(Path(f"/proc/{runtime.pid}/smaps").read_text())
        return {
            "http": self.own.memory_info().rss / 2**20,
            "runtime": rest,
            "KV pool": pool,
            "compile": compilers / 2**20,
        }

    def runtime_directory(self) -> Path:
        directories = [path for path in self.folder.iterdir() if (path / "frames").exists()]
        return max(directories, key=lambda path: path.stat().st_mtime)

    def counts(self) -> dict[str, Any]:
        """The runtime's counters."""
        counts: dict[str, Any] = self.http.get("/status").json()["runtime"]
        return counts

    def is_idle(self) -> bool:
        counts = self.counts()
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
        answers = [self.http.post(path, json={"model": "default", **body}) for path, body in CANARIES]
        return [answer.json()["choices"][0]["text"] if answer.is_success else answer.text for answer in answers]

    def same_answers(self, fault: str, expected: list[str]) -> Figure:
        """Compares the answers to the fixed requests with those that they had."""
        return none_of(fault, [] if self.canaries() == expected else ["differ"], len(CANARIES), "differ")

    def seconds_to_serve(self) -> float:
        """The time that a short request takes; infinity if it fails."""
        start = time.perf_counter()
        return time.perf_counter() - start if self.complete().status_code == 200 else float("inf")

    def num_tracebacks(self) -> int:
        """Tracebacks in the log, without those of failures that `injection/` caused."""
        lines = self.log.read_text(errors="replace").splitlines()
        return sum(line.startswith("Traceback") for line in lines) - sum(
            line.startswith("sitecustomize.InjectedFault: ") for line in lines
        )


@contextlib.contextmanager
def serve(
    *options: str,
    model: str = "",
    has_keys: bool = False,
    keys: Sequence[str] = KEYS,
    folder: Path | None = None,
    log: IO[Any] | int | None = None,
    before_exec: Callable[[], None] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Runs `plait serve` for the block, with `environment` added. Everything that it started has ended afterwards.

    has_keys: it has `keys`, and `Server.key` is the first.
    """
    own_folder = Path(tempfile.mkdtemp(prefix="plait-faults-"))
    try:
        command = [sys.executable, "-P", "-m", "plait.cli", "serve", *filter(None, [model]), "--port=0", *options]
        if has_keys:
            (own_folder / "keys").write_text("".join(f"{key.split('-')[0]} {key}\n" for key in keys))
            command.append(f"--api-key-file={own_folder / 'keys'}")
        with (own_folder / "log").open("w") as log_file:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log_file if log is None else log,
                text=True,
                env={**os.environ, "TMPDIR": str(folder or own_folder), **environment},
                preexec_fn=partial(_begin_session, _scheduling_priority(), before_exec),
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("plait serves at "):
                raise RuntimeError(f"plait serve did not start: {(own_folder / 'log').read_text()[-500:]}")
            server = Server(
                process, line.split()[-1], folder or own_folder, own_folder / "log", keys[0] if has_keys else ""
            )
            with contextlib.closing(server.http):
                server.complete()  # the first request waits for the model
                yield server
        finally:
            end(process, 5)
    finally:
        shutil.rmtree(own_folder, ignore_errors=True)


def _scheduling_priority() -> str:
    """The nice value of this session's scheduling group, which Linux gives every session; "" without groups."""
    try:
        return next(reversed(AUTOGROUP.read_text().split()), "")  # some containers show an empty file
    except OSError:
        return ""


def _begin_session(priority: str, before_exec: Callable[[], None] | None) -> None:
    """Runs in the new process: its session gets the priority of the suite's."""
    if priority:
        with contextlib.suppress(OSError):  # a higher priority needs a privilege
            AUTOGROUP.write_text(priority)
    if before_exec is not None:
        before_exec()
