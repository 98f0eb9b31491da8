"""`plait serve`: the runtime process, and in this one the HTTP server in front of it.

The runtime process is started before the server is imported, so that both load at once.

Knows: sockets, what is started in which order. Must not know: routes, uvicorn.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from typing import Any

import msgspec

from plait.runtime.errors import InputError
from plait.runtime.server.ops.request_log import LogFormat, set_up_log
from plait.runtime.server.ops.tracing import export_spans
from plait.runtime.server.restarting_runtime import RestartingRuntime
from plait.runtime.server.settings import BACKLOG, ServerSettings

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
        runtime = RestartingRuntime(model, meanwhile=_import_server, **engine)
        try:
            from plait.runtime.server.uvicorn_server import run

            return run(runtime, settings, listener, _address(settings, listener))
        finally:
            runtime.shutdown()


def _import_server() -> None:
    import plait.runtime.server.uvicorn_server  # noqa: F401


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
