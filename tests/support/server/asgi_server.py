"""Serves an ASGI application on a real socket in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn


class EagerServer(uvicorn.Server):
    """Ends as soon as it is told to. uvicorn looks every tenth of a second, and then waits for another one."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_told = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._is_told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits as uvicorn does if there are requests; idle connections end at once."""
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)

    def tell(self) -> None:
        """Ends it, from another thread."""
        self._loop.call_soon_threadsafe(self._is_told.set)


@contextlib.contextmanager
def serve_app(app: Any, http: Any = "auto", keep_alive_s: float = 60) -> Iterator[str]:
    """Serves `app` for the block. Yields its address. keep_alive_s: how long idle connections stay open."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=1,
    )
    server = EagerServer(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.tell()
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def serve_runtime(app: Any, runtime: Any) -> Iterator[str]:
    """Serves the application of a runtime in a thread for the block, so that a test sees how far a request is.

    As in `plait serve` the server's event loop reads the runtime's replies. Yields the address.
    """
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    batches = app.state.plait.batches

    async def serve() -> None:
        runtime.attach_to_loop()
        if batches is not None:
            batches.start()
        await server.serve()
        if batches is not None:
            await batches.stop()
        runtime.detach_from_loop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
