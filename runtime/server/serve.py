"""Starts `plait serve`: the runtime in a separate process, and the HTTP server in this one.

The runtime process is started before the server's modules are imported, so both load at once.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from plait.runtime.errors import InputError
from plait.runtime.executor.host_machine import num_threads
from plait.runtime.server.ops.request_log import LogFormat, set_up_log
from plait.runtime.server.ops.tracing import export_spans
from plait.runtime.server.restarting_runtime import RestartingRuntime
from plait.runtime.server.settings import BACKLOG, ServerSettings

if TYPE_CHECKING:
    from plait.runtime.server.replicated_runtime import ReplicatedRuntime

MAX_REPLICAS = 64
SEND_BUFFER_BYTES = 1 << 17  # Linux reserves twice as much

log = logging.getLogger("plait.server")


def serve(
    model: str | None,
    settings: ServerSettings,
    log_format: LogFormat = "json",
    replicas: int | None = None,
    **engine: Any,
) -> int:
    """Serves until SIGINT or SIGTERM and returns the exit code. `engine`: settings of `Runtime`.

    replicas: how many runtimes of the model a router places requests on; None for one runtime without a router.
    Prints one line with the address once the server accepts connections. Exit codes: 0 after a graceful shutdown, 130
    after a second SIGINT, 1 if the runtime died and could not be restarted. Raises InputError if the address cannot be
    bound, and what `Runtime` raises for a model that cannot run.
    """
    if replicas is not None and not 1 <= replicas <= MAX_REPLICAS:
        raise InputError(f"--replicas takes a number from 1 to {MAX_REPLICAS}, not {replicas}")
    listener = _bind(settings)  # before the model is loaded, so that a port in use is reported at once
    set_up_log(log_format)
    export_spans()
    if not settings.api_keys and not _is_local(listener):
        log.warning("the server has no API key: anyone who can reach its address can use it")
    with listener:
        runtime = _start(model, settings.stuck_after_s, replicas, engine)
        try:
            from plait.runtime.server.uvicorn_server import run

            settings = msgspec.structs.replace(settings, max_running=runtime.client.model.max_batch_rows)
            return run(runtime, settings, listener, _address(settings, listener))
        finally:
            runtime.shutdown()


def _start(
    model: str | None, stuck_after_s: float, replicas: int | None, engine: dict[str, Any]
) -> RestartingRuntime | ReplicatedRuntime:
    if replicas is None:
        return RestartingRuntime(model, _import_server, stuck_after_s, **engine)
    from plait.runtime.server.replicated_runtime import ReplicatedRuntime, replica_devices

    device, size = engine.pop("device", None), engine.get("tensor_parallel_size", 1)
    if device is not None and "," in device:
        devices = replica_devices(replicas, device)
    else:
        devices = replica_devices(replicas * size, device)[::size]  # the first GPU of every replica
    # The replicas share the cores: more threads than cores wait for each other in every operation.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads() // replicas)))
    return ReplicatedRuntime(model, devices, _import_server, stuck_after_s, **engine)


def _import_server() -> None:
    import plait.runtime.server.uvicorn_server  # noqa: F401


def _bind(settings: ServerSettings) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _limit_unread_bytes(listener, settings.write_timeout_s)
        listener.bind(address)
        listener.listen(BACKLOG)  # at once: with SO_REUSEADDR two servers could both bind until one of them listens
    except (OSError, UnicodeError) as error:
        errno = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(errno) if errno is not None and errno > 0 else str(error)
        raise InputError(f"cannot listen at {settings.host} port {settings.port}: {reason}") from None
    listener.setblocking(False)
    return listener


def _limit_unread_bytes(listener: socket.socket, timeout_s: float) -> None:
    """Limits what the kernel keeps of a response that its client does not read, and for how long.

    Accepted connections inherit both options. Without them the kernel keeps up to 4 MiB as long as the client lives.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


def _address(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _is_local(listener: socket.socket) -> bool:
    return ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback
