"""Processes that a benchmark starts: their end, their processor time, and their memory."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

STOP_S = 20.0


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Ends a process with the block."""
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[Any], patience_s: float = STOP_S) -> None:
    """Ends a process and what it started, stopped processes included.

    A process that reads its standard input may end by itself, when it is closed.
    """
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if process.stdin is not None:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, 10)
    if process.stdout is not None:
        process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class CpuTimer:
    """Measures the CPU seconds of a process since the timer was created or last read."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._before = self._now()

    def _now(self) -> float:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in self._tasks.iterdir()) / 1e9

    def read(self) -> float:
        before, self._before = self._before, self._now()
        return self._before - before


def runtime_of(server: psutil.Process) -> psutil.Process:
    """The runtime process of `plait serve`: the child with the most memory."""
    return max(server.children(), key=lambda child: child.memory_info().rss)


def resident_mib(smaps: str) -> tuple[float, float]:
    """Resident memory in a process's smaps: of its largest mapping without a file (the KV pool), and of all others."""
    mappings: list[tuple[int, int]] = []  # size and resident memory, in KiB
    is_anonymous = False
    for line in smaps.splitlines():
        words = line.split()
        if words[0] == "Size:":
            mappings.append((int(words[1]) if is_anonymous else 0, 0))
        elif words[0] == "Rss:":
            mappings[-1] = (mappings[-1][0], int(words[1]))
        elif not words[0].endswith(":"):
            is_anonymous = len(words) < 6  # address, permissions, offset, device, inode, and the file's path
    pool = max(mappings)[1]
    return pool / 1024, (sum(resident for _, resident in mappings) - pool) / 1024
