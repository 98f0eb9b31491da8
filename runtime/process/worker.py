"""The runtime process: `python -m plait.runtime.process.worker`, started by `process.runtime.Runtime`.

It reads one JSON line from standard input (`WorkerArgs`), loads the model, and serves until standard input ends, which
means that its owner has exited. It reports its progress as JSON lines on standard output.
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
    """The JSON line on standard input. `directory` is where the sockets are created."""

    config: EngineConfig
    model_path: str
    directory: str


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C; this process ends with the owner
    signal.signal(signal.SIGTERM, _exit_on_signal)
    args = msgspec.json.decode(_read_line(sys.stdin.fileno()), type=WorkerArgs)
    os.umask(0o077)
    try:
        return _serve(args)
    except SystemExit:  # SIGTERM while loading; the owner may be ending too and then removes nothing
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
        args.config,
        Path(args.model_path),
        transport,
        lambda fraction, doing: _send_status(progress=fraction, doing=doing),
    )
    signal.signal(signal.SIGTERM, lambda number, frame: transport.stop())
    _send_status(ready=True)
    engine_loop.compiler.start_workers()  # in the background, so that the first constraint does not wait for them
    try:
        while not transport.should_stop:
            engine_loop.step(timeout_s=None)
    finally:
        engine_loop.compiler.close()
        transport.close()
        if transport.owner_exited:  # otherwise the owner removes it after it has read the log
            shutil.rmtree(args.directory, ignore_errors=True)
    return 0


def _read_line(fd: int) -> bytes:
    """Reads one line byte by byte, so that nothing after it is taken from the pipe."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _send_status(**fields: object) -> None:
    try:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the owner has exited; standard input will end, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
