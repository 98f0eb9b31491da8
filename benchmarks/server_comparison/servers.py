"""Starts a server, waits for its first token, measures its memory, and ends it.

A server is a command, an address and a model name. Peers come from a TOML file:

    [[server]]
    name = "vLLM"
    command = "VLLM_CPU_KVCACHE_SPACE=2 vllm serve DIR --served-model-name smol --port 8000"
    url = "http://127.0.0.1:8000"
    model = "smol"
    most = 64                # requests that it can run at once
    start_s = 300            # the timeout of its start, in seconds
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from common.processes import end, free_port, resident_mib, runtime_of
from server_comparison.client import ANSWER_TIMEOUT_S, Chat, ServerError


@dataclass(frozen=True)
class Server:
    """See the file's header. `command` may begin with NAME=VALUE; "" stands for a server that already runs."""

    name: str
    url: str
    model: str
    command: str = ""
    most: int = 512
    start_s: float = 300.0


@dataclass
class Started:
    """A server that has answered with its first token, `start_s` seconds after its start (0: it already ran)."""

    chat: Chat
    start_s: float
    pid: int | None

    def resident_bytes(self) -> int:
        """The resident bytes of all processes of the server; 0 if this program did not start it."""
        if self.pid is None:
            return 0
        root, resident = psutil.Process(self.pid), 0
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                resident += process.memory_full_info().pss
        return resident

    def kv_bytes(self) -> int:
        """The resident part of the KV cache of `plait serve`."""
        assert self.pid is not None
        runtime = runtime_of(psutil.Process(self.pid))
        return int(resident_mib(Path(f"/proc/{runtime.pid}/smaps").read_text())[0] * 2**20)


def read_servers(path: Path) -> list[Server]:
    """Reads the servers in a TOML file. Raises ValueError for a wrong field."""
    try:
        return [Server(**entry) for entry in tomllib.loads(path.read_text()).get("server", [])]
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def own_server(weights: str) -> Server:
    """Returns `plait serve` of this Python with a weight format. It queues without a time limit, as the peers do."""
    port = free_port()
    command = f"{shlex.quote(sys.executable)} -P -m plait.cli serve --port {port} --weights {weights}"
    return Server(f"plait {weights}", f"http://127.0.0.1:{port}", "default", command)


@contextlib.contextmanager
def started(server: Server) -> Iterator[Started]:
    """Runs a server for the block. Raises ServerError with the end of its log if it does not start."""
    if not server.command:
        yield Started(Chat(server.url, server.model, server.most), 0.0, None)
        return
    words = shlex.split(server.command)
    assignments = [word for word in words if "=" in word.split("/")[0]]
    settings = dict(word.split("=", 1) for word in words[: len(assignments)] if word in assignments)
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(
            words[len(settings) :],
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while not _answers(server):
                if process.poll() is not None or time.perf_counter() - start > server.start_s:
                    log.seek(0)
                    log_end = log.read().decode(errors="replace").strip()[-400:]
                    raise ServerError(f"{server.name} did not start within {server.start_s:.0f} s: {log_end}")
                time.sleep(0.1)
            yield Started(Chat(server.url, server.model, server.most), time.perf_counter() - start, process.pid)
        finally:
            end(process)


def _answers(server: Server) -> bool:
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    try:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=ANSWER_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.is_success
