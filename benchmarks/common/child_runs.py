"""Runs a function on many items in child processes, which may take too long, too much memory, or die."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 4 << 30


def in_children(call: Callable[[Any], Any], items: list[Any], deadline_s: float) -> list[Any]:
    """Returns what `call` returns for each item, in JSON's types; None if it raises, dies or takes too long.

    It runs in a fork of this process, which is replaced if it dies or is late.
    """
    found: list[Any] = []
    while len(found) < len(items):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            run(call, items[len(found) :], writing)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as answers:  # select would not see what a buffer holds
            while len(found) < len(items):
                ready, _, _ = select.select([reading], [], [], deadline_s)
                line = answers.readline() if ready else b""
                found.append(json.loads(line) if line else None)
                if not line:
                    break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def run(call: Callable[[Any], Any], items: list[Any], writing: int) -> None:
    """Writes a line for each item, null if `call` raises; then exits."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        for item in items:
            try:
                answer = call(item)
            except Exception:
                answer = None
            os.write(writing, f"{json.dumps(answer)}\n".encode())
    finally:
        os._exit(0)
