"""`plait serve`: the runtime process, and in this one the HTTP server in front of it.

Knows: sockets, signals, uvicorn. Must not know: routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn

from plait.runtime.errors import InputError
from plait.runtime.server.app import create_app
from plait.runtime.server.restarting import RestartingRuntime
from plait.runtime.server.settings import ServerSettings

DRAIN_S = 5
BACKLOG = 2048


def serve(model: str | None, settings: ServerSettings, **engine: Any) -> int:
    """Serves until SIGINT or SIGTERM; the exit code. `engine` are settings of `Runtime`.

    Prints one line with the address once clients can come. Raises InputError when the address cannot be taken, and
    what `Runtime` raises for a model that cannot be run.
    """
    listener = _bind(settings)  # before the model is loaded: a taken port is told at once
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with listener:
        runtime = RestartingRuntime(model, **engine)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(_serve(runtime, settings, listener))
        finally:
            runtime.shutdown()
    return 0


async def _serve(runtime: RestartingRuntime, settings: ServerSettings, listener: socket.socket) -> None:
    config = uvicorn.Config(
        create_app(runtime, settings),
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=BACKLOG,
    )
    server = _Server(config, _address(settings, listener))
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn that says where it listens, once it does, and does not kill itself by the signal that ended it."""

    def __init__(self, config: uvicorn.Config, address: str) -> None:
        super().__init__(config)
        self._said = f"plait serves at {address}"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._said, flush=True)


def _bind(settings: ServerSettings) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno and error.errno > 0 else str(error)
        raise InputError(f"cannot listen at {settings.host} port {settings.port}: {why}") from None
    listener.setblocking(False)
    return listener


def _address(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # there is none for this system; asyncio's own is slower and does the same
        return asyncio.new_event_loop
    return uvloop.new_event_loop
