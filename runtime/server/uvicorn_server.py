"""Runs the application under uvicorn, on a socket that is already bound, in its own event loop.

Importing this module takes a second; `serve` does so while the runtime process loads the model.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import uvicorn

from plait.runtime.executor.host_machine import trim_heap
from plait.runtime.server.app import Application, create_app
from plait.runtime.server.batches.directory import StateDirectory
from plait.runtime.server.engines.engine_pool import EnginePool
from plait.runtime.server.engines.pooled_model import Engine
from plait.runtime.server.graceful_shutdown import GracefulServer
from plait.runtime.server.http.connection_limits import make_http_protocol
from plait.runtime.server.listener import url_of
from plait.runtime.server.settings import BACKLOG, ServerSettings

CLOSE_TIMEOUT_S = 2  # for connections to close after the last request has ended


def run(
    runtime: Engine | EnginePool, settings: ServerSettings, listener: socket.socket, directory: StateDirectory | None
) -> int:
    """Serves until a signal stops it, and returns the exit code. Prints the address once connections are accepted.

    directory: of files and batches.
    """
    gc.collect()
    gc.freeze()  # the tokenizer's hundred thousand objects live as long as the process: collections skip them now
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(runtime, settings, listener, directory))


async def _serve(
    runtime: Engine | EnginePool, settings: ServerSettings, listener: socket.socket, directory: StateDirectory | None
) -> int:
    app = create_app(runtime, settings, directory)
    trim_heap()  # returns what creating the routes and reading the tokenizer left free
    server = make_server(app, settings, listener)
    runtime.attach_to_loop()
    batches = app.state.plait.batches
    try:
        if batches is not None:
            batches.start()
        await server.serve(sockets=[listener])
        if batches is not None:
            await batches.stop()
    finally:
        runtime.detach_from_loop()
    return server.exit_code


def make_server(app: Application, settings: ServerSettings, listener: socket.socket) -> GracefulServer:
    """Returns the server of an application, which prints its address when it accepts connections."""
    config = uvicorn.Config(
        app,
        http=make_http_protocol(settings.idle_timeout_s, settings.write_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # no client address is used anywhere
        timeout_keep_alive=max(1, round(settings.idle_timeout_s)),
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        backlog=BACKLOG,
    )
    return GracefulServer(config, app.state.plait, url_of(settings.host, listener))


def loop_factory() -> Any:
    """Returns a function that makes an event loop."""
    try:
        import uvloop
    except ImportError:  # not available on every system; asyncio's own loop is slower and otherwise equivalent
        return asyncio.new_event_loop
    return uvloop.new_event_loop
