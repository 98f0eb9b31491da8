"""The HTTP server of this process, on a socket that was bound before: the app, uvicorn, and the event loop they run in.

What it imports takes a second, which `serve` spends while the runtime process loads the model.

Knows: uvicorn, the app. Must not know: routes, processes, options.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import uvicorn

from plait.runtime.executor.host_machine import trim_heap
from plait.runtime.server.app import create_app
from plait.runtime.server.graceful_shutdown import GracefulServer
from plait.runtime.server.http.connection_timeouts import make_http_protocol
from plait.runtime.server.restarting_runtime import RestartingRuntime
from plait.runtime.server.settings import BACKLOG, ServerSettings

CLOSE_TIMEOUT_S = 2  # for connections to be closed, once no request is left


def run(runtime: RestartingRuntime, settings: ServerSettings, listener: socket.socket, address: str) -> int:
    """Serves until it is told to stop; the exit code. `address` is what is printed once clients can come."""
    gc.collect()
    gc.freeze()  # the tokenizer's hundred thousand objects live as long as we do: no collection looks at them again
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(runtime, settings, listener, address))


async def _serve(runtime: RestartingRuntime, settings: ServerSettings, listener: socket.socket, address: str) -> int:
    app = create_app(runtime, settings)
    trim_heap()  # what making the routes and reading the tokenizer left
    config = uvicorn.Config(
        app,
        http=make_http_protocol(settings.idle_timeout_s, settings.write_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks whose address a client has
        timeout_keep_alive=max(1, round(settings.idle_timeout_s)),
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        backlog=BACKLOG,
    )
    server = GracefulServer(config, app.state.plait, runtime, address)
    runtime.attach_to_loop()
    try:
        await server.serve(sockets=[listener])
    finally:
        runtime.detach_from_loop()
    return server.exit_code


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # there is none for this system; asyncio's own is slower and does the same
        return asyncio.new_event_loop
    return uvloop.new_event_loop
