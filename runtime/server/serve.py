"""`plait serve`: the runtime process, and in this one the HTTP server in front of it.

Knows: sockets, uvicorn, what is started in which order. Must not know: routes.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import socket
from typing import Any

import msgspec
import uvicorn

from plait.runtime.errors import InputError
from plait.runtime.machine import give_back_memory
from plait.runtime.server.app import create_app
from plait.runtime.server.connections import patient_protocol
from plait.runtime.server.draining import DrainingServer
from plait.runtime.server.request_log import LogFormat, set_up_log
from plait.runtime.server.restarting import RestartingRuntime
from plait.runtime.server.settings import ServerSettings
from plait.runtime.server.tracing import export_spans

CLOSE_S = 2  # for connections to be closed, once no request is left
BACKLOG = 2048

log = logging.getLogger("plait.server")


def serve(model: str | None, settings: ServerSettings, log_format: LogFormat = "json", **engine: Any) -> int:
    """Serves until SIGINT or SIGTERM; the exit code. `engine` are settings of `Runtime`.

    Prints one line with the address once clients can come. 0: it was told to stop and did; 130: it was told twice;
    1: the runtime died and could not be started again. Raises InputError when the address cannot be taken, and what
    `Runtime` raises for a model that cannot be run.
    """
    listener = _bind(settings)  # before the model is loaded: a taken port is told at once
    set_up_log(log_format)
    export_spans()
    if not settings.api_keys and not _is_local(listener):
        log.warning("whoever reaches this address may use the server: it has no API key")
    settings = msgspec.structs.replace(settings, max_running=engine.get("max_batch_rows", settings.max_running))
    with listener:
        runtime = RestartingRuntime(model, **engine)
        gc.collect()
        gc.freeze()  # the tokenizer's hundred thousand objects live as long as we do: no collection looks at them again
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_serve(runtime, settings, listener))
        finally:
            runtime.shutdown()


async def _serve(runtime: RestartingRuntime, settings: ServerSettings, listener: socket.socket) -> int:
    app = create_app(runtime, settings)
    give_back_memory()  # what making the routes and reading the tokenizer left
    config = uvicorn.Config(
        app,
        http=patient_protocol(settings.idle_timeout_s, settings.write_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks whose address a client has
        timeout_keep_alive=max(1, round(settings.idle_timeout_s)),
        timeout_graceful_shutdown=CLOSE_S,
        backlog=BACKLOG,
    )
    server = DrainingServer(config, app.state.plait, runtime, _address(settings, listener))
    runtime.join_loop()
    try:
        await server.serve(sockets=[listener])
    finally:
        runtime.leave_loop()
    return server.exit_code


def _bind(settings: ServerSettings) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # now: two that are bound and do not listen yet could both have the port
    except (OSError, UnicodeError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno and error.errno > 0 else str(error)
        raise InputError(f"cannot listen at {settings.host} port {settings.port}: {why}") from None
    listener.setblocking(False)
    return listener


def _address(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _is_local(listener: socket.socket) -> bool:
    return ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # there is none for this system; asyncio's own is slower and does the same
        return asyncio.new_event_loop
    return uvloop.new_event_loop
