"""The runtime process: `python -m plait.runtime.process.worker`, started by `launch.Runtime`.

Reads one JSON line from standard input (settings, model, directory), then serves until standard input ends,
which is when its owner has. Says how far it is in JSON lines on standard output.

Knows: the owner's two pipes and the loop. Must not know: what a step does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import msgspec

from plait.runtime.config import EngineConfig
from plait.runtime.errors import PlaitError


class WorkerArgs(msgspec.Struct):
    """What the owner wants started."""

    config: EngineConfig
    model_path: str
    directory: str


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle; its end is ours
    signal.signal(signal.SIGTERM, _exit_on_signal)
    args = msgspec.json.decode(_read_line(sys.stdin.fileno()), type=WorkerArgs)
    os.umask(0o077)
    try:
        return _serve(args)
    except SystemExit:  # told to end while it loads, perhaps together with its owner, who then removes nothing
        shutil.rmtree(args.directory, ignore_errors=True)
        raise
    except PlaitError as error:
        _send_status(error=type(error).__name__, text=str(error))
        return 2
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        _send_status(error="RuntimeGone", text=f"the runtime could not start: {type(error).__name__}: {error}")
        return 1


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _serve(args: WorkerArgs) -> int:
    _send_status(progress=0.0, doing="loading torch")
    from plait.runtime.process.builder import build_engine_loop
    from plait.runtime.transport.zmq_server import ZmqServerTransport

    transport = ZmqServerTransport(Path(args.directory), owner_fd=sys.stdin.fileno())
    engine_loop = build_engine_loop(
        args.config, Path(args.model_path), transport, lambda share, doing: _send_status(progress=share, doing=doing)
    )
    signal.signal(signal.SIGTERM, lambda number, frame: transport.stop())
    _send_status(ready=True)
    try:
        while not transport.should_stop:
            engine_loop.step(timeout_s=None)
    finally:
        engine_loop.compiler.close()
        transport.close()
        if transport.owner_exited:  # else the owner removes it, once it has read our last words
            shutil.rmtree(args.directory, ignore_errors=True)
    return 0


def _read_line(fd: int) -> bytes:
    """One line, unbuffered, so that the rest of the pipe stays in the pipe."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _send_status(**what: object) -> None:
    try:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the owner is gone; standard input will say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
