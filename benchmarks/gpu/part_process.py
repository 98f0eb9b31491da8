"""Runs one part of the GPU benchmarks in its own process and reads its figures from a pipe as they come."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
MIN_PART_S = 15.0  # a part is not begun with less time left
POLL_S = 0.1
TOOLS = ("compute-sanitizer", "ncu")
FAILURE_PREFIXES = ("FAILED ", "ERROR ", "========= Invalid ", "========= Race ")  # of pytest and compute-sanitizer

Part = dict[str, Any]


def new_part(state: str) -> Part:
    """Returns the record of a part. `failures`: checks that failed while the rest of the part went on."""
    return {"state": state, "seconds": 0.0, "figures": [], "done": [], "failures": [], "output": []}


def read_line(part: Part, line: str) -> bool:
    """Adds a line of output to a part's record. Returns whether it was a figure, a failure or another result."""
    part["output"].append(line)
    if line.startswith(FAILURE_PREFIXES):
        part["failures"].append(line)
        return True
    if not line.startswith("{"):
        return False
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return False
    if "done" in found:
        part["done"].append(found["done"])
    elif "name" in found and "value" in found:
        part["figures"].append(found)
        if found.get("ok") is False:
            part["failures"].append(f"{found['name']}: the result differs from the reference")
    elif "failed" in found:
        part["failures"].append(f"{found['failed']}: {found.get('error', '')}")
    else:
        part |= found  # the preflight's machine and missing modules
    return True


def full_command(command: list[str]) -> list[str]:
    """Returns the command with python's path in its place."""
    if command[0] in TOOLS:
        at = command.index("python")
        return [*command[:at], sys.executable, *command[at + 1 :]]
    return [sys.executable, *command]


def run(part: Part, command: list[str], seconds: float, log: IO[str], on_result: Callable[[], None]) -> None:
    """Runs a part for at most `seconds`; fills its record, appends its lines to `log`, calls `on_result` at results.

    `command`: what follows python, or begins with one of TOOLS, which starts python.
    """
    if seconds < MIN_PART_S:
        part["state"] = "no time left"
        return
    path = os.pathsep.join(filter(None, [str(ROOT / ".path"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONSAFEPATH", None)  # the scripts import what lies beside them
    begun, part["state"] = time.monotonic(), "running"
    child = subprocess.Popen(
        full_command(command),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its own children end with it
    )

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            log.flush()
            part["seconds"] = time.monotonic() - begun
            if read_line(part, line.rstrip("\n")):
                on_result()

    reader = threading.Thread(target=read, name="part-output", daemon=True)
    reader.start()
    try:
        while child.poll() is None and time.monotonic() - begun < seconds:
            time.sleep(POLL_S)
        is_late = child.returncode is None
    finally:  # also if this process is terminated
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        reader.join(timeout=10)
    part["seconds"] = time.monotonic() - begun
    ended = f"FAILED with {child.returncode}" if child.returncode else "done"
    part["state"] = f"CUT OFF after {seconds:.0f} s" if is_late else ended
    on_result()
