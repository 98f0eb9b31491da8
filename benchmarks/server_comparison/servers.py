"""Starts a server, waits for its first token, says what memory it takes, and ends it: one after the other.

A server is a command, an address and a model's name; plait's own commands are made here, peers come from a TOML file:

    [[server]]
    name = "vLLM"
    command = "VLLM_CPU_KVCACHE_SPACE=2 vllm serve DIR --served-model-name smol --port 8000"
    url = "http://127.0.0.1:8000"
    model = "smol"
    most = 64                # requests it can work on at once
    start_s = 300            # how long it may take to start

Knows: processes. Must not know: workloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from server_comparison.client import Chat, ServerError

STOP_S = 20.0
LARGE = 64 << 20  # bytes of a mapping that may be the KV cache


@dataclass(frozen=True)
class Server:
    """See the file's header. `command` may begin with NAME=VALUE; "" for a server that runs already."""

    name: str
    url: str
    model: str
    command: str = ""
    most: int = 512
    start_s: float = 300.0


@dataclass
class Memory:
    """Bytes of all its processes; `kv` is what of the KV cache has been written, 0 where it cannot be told."""

    resident: int
    kv: int = 0


@dataclass
class Started:
    """A server that has given its first token, `start_s` seconds after it was started (0: it ran already)."""

    chat: Chat
    start_s: float
    pid: int | None

    def memory(self, kv_budget: int = 0) -> Memory | None:
        """What it holds now; None without a process of ours."""
        if self.pid is None:
            return None
        resident = kv = 0
        root = psutil.Process(self.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                resident += process.memory_full_info().pss
                kv += _kv(process, kv_budget) if kv_budget > LARGE else 0
        return Memory(resident, kv)


def read_servers(path: Path) -> list[Server]:
    """The peers in a file. Raises ValueError for one that is not as the header says."""
    try:
        return [Server(**entry) for entry in tomllib.loads(path.read_text()).get("server", [])]
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def own_server(weights: str, options: str = "") -> Server:
    """`plait serve` of this Python, with one form of the weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{shlex.quote(sys.executable)} -P -m plait.cli serve --port {port} --weights {weights} {options}"
    return Server(f"plait {weights}{options and ' ' + options}", f"http://127.0.0.1:{port}", "default", command)


@contextlib.asynccontextmanager
async def started(server: Server) -> AsyncIterator[Started]:
    """The server, until the block ends. Raises ServerError with the end of its log if it does not start."""
    if not server.command:
        yield Started(Chat(server.url, server.model, server.most), 0.0, None)
        return
    words = shlex.split(server.command)
    named = [word for word in words if "=" in word.split("/")[0]]
    settings = dict(word.split("=", 1) for word in words[: len(named)] if word in named)
    with tempfile.TemporaryFile() as log:
        begun = time.perf_counter()
        process = subprocess.Popen(
            words[len(settings) :],
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            chat = Chat(server.url, server.model, server.most)
            while not await _answers(chat):
                if process.poll() is not None or time.perf_counter() - begun > server.start_s:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip()[-400:]
                    raise ServerError(f"{server.name} did not start within {server.start_s:.0f} s: {said}")
                await asyncio.sleep(0.1)
            yield Started(chat, time.perf_counter() - begun, process.pid)
        finally:
            _end(process)


async def _answers(chat: Chat) -> bool:
    try:
        await chat.ask([{"role": "user", "content": "Hi"}], 1)
    except ServerError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and those it started, by its own group."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            return


def _kv(process: psutil.Process, budget: int) -> int:
    """Resident bytes of the mappings of about the KV budget's size."""
    sizes = range(int(0.95 * budget), int(1.1 * budget))
    found = process.memory_maps(grouped=False)
    return sum(each.rss for each in found if not each.path.startswith("/") and each.size in sizes)
