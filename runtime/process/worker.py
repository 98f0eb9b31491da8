"""The runtime process: `python -m plait.runtime.process.worker`, started by `process.runtime.Runtime`.

It reads one JSON line from standard input (`WorkerArgs`), loads the model, and serves until standard input ends, which
means that its owner has exited. It reports its progress as JSON lines on standard output.

It ignores SIGINT, SIGTERM, SIGHUP and SIGQUIT: they may be sent to a process group or to a service with all its
processes, and the owner may have requests to finish. The owner ends this process.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plait.host import group_signals
from plait.host.owner import watch_owner
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError, PlaitError
from plait.runtime.log_writer import LogWriter
from plait.runtime.process.idle_work import IdleWork

if TYPE_CHECKING:  # slow imports, which begin after the first report of progress
    from plait.runtime.scheduler.engine_loop import EngineLoop
    from plait.runtime.transport.zmq_server import ZmqServerTransport

SWITCH_S = 0.0005  # for which another thread may keep the interpreter's lock from the loop; Python's default is 0.005
MAX_ARGS_BYTES = 1 << 20


class WorkerArgs(msgspec.Struct):
    """The JSON line on standard input. `directory` is where the sockets are created."""

    config: EngineConfig
    model_path: str
    directory: str


def main() -> int:
    group_signals.ignore()
    os.umask(0o077)
    gc.disable()  # until the model is loaded: collections would visit its objects again and again
    try:
        return _serve(_read_args(sys.stdin.fileno()))
    except PlaitError as error:
        _send_status(error=type(error).__name__, text=str(error))
        return 2
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        _send_status(error="RuntimeGone", text=f"the runtime could not start: {type(error).__name__}: {error}")
        return 1


def _serve(args: WorkerArgs) -> int:
    is_loaded = threading.Event()
    watch_owner(partial(_exit_while_loading, is_loaded, args.directory))
    _send_status(progress=0.0, doing="starting")
    from plait.runtime.process.builder import build_engine_loop
    from plait.runtime.transport.zmq_server import ZmqServerTransport

    transport = ZmqServerTransport(Path(args.directory), owner_fd=sys.stdin.fileno())
    engine_loop = build_engine_loop(
        args.config,
        Path(args.model_path),
        transport,
        lambda fraction, doing: _send_status(progress=fraction, doing=doing),
    )
    is_loaded.set()  # from now on the transport watches the owner
    gc.freeze()  # what was loaded lives as long as the process: collections skip it
    gc.enable()
    log = LogWriter(sys.stderr.fileno())
    engine_loop.error_log.write = log.put
    _send_status(ready=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads the pipe any more
    try:
        _run(engine_loop, transport)
    finally:
        engine_loop.close()
        log.flush()
        transport.close()
        if transport.should_stop:  # otherwise the owner removes it after it has read the log
            shutil.rmtree(args.directory, ignore_errors=True)
    return 0


def _run(engine_loop: EngineLoop, transport: ZmqServerTransport) -> None:
    """Serves until the owner has exited, and prepares for constraints while no sequence runs."""
    sys.setswitchinterval(SWITCH_S)  # a step asks for the lock after each kernel, also beside the build of a grammar
    idle_work = IdleWork(engine_loop.compiler)
    while not transport.should_stop:
        engine_loop.step(timeout_s=idle_work.timeout_s())
        idle_work.go_on(is_busy=engine_loop.has_work)


def _exit_while_loading(is_loaded: threading.Event, directory: str) -> None:
    """Ends this process when its owner has exited while the model is loaded, which may take minutes."""
    if not is_loaded.is_set():
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)


def _read_args(fd: int) -> WorkerArgs:
    """Reads the line of arguments. Raises InputError for anything else."""
    try:
        return msgspec.json.decode(_read_line(fd), type=WorkerArgs)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and text that is not UTF-8
        raise InputError(f"standard input is not a line of arguments from `Runtime`: {error!s:.200}") from None


def _read_line(fd: int) -> bytes:
    """Reads one line byte by byte, so that nothing after it is taken from the pipe. Raises ValueError if it is long."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
        if len(line) > MAX_ARGS_BYTES:
            raise ValueError(f"the line has more than {MAX_ARGS_BYTES} bytes")
    return bytes(line)


def _send_status(**fields: object) -> None:
    try:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the owner has exited; standard input will end, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
