"""Starts `plait serve`: the runtime in a separate process, and the HTTP server in this one.

The runtime process is started before the server's modules are imported, so both load at once. With a models file no
runtime starts before the first request.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plait.runtime.errors import InputError
from plait.runtime.server.batches.directory import StateDirectory
from plait.runtime.server.engines.start import check_replicas, start_engine
from plait.runtime.server.listener import bind_listener, is_loopback
from plait.runtime.server.ops.request_log import LogFormat, set_up_log
from plait.runtime.server.ops.tracing import export_spans
from plait.runtime.server.settings import ServerSettings

if TYPE_CHECKING:
    from plait.runtime.server.engines.model_spec import ModelSpec

KEEP = 3  # models that stay loaded

log = logging.getLogger("plait.server")


def serve(
    model: str | None,
    settings: ServerSettings,
    log_format: LogFormat = "json",
    **engine: Any,
) -> int:
    """Serves one model until SIGINT or SIGTERM and returns the exit code.

    engine: settings of `Runtime`, and `replicas`: how many runtimes of the model a router places requests on; None for
    one runtime without a router.
    Prints one line with the address once the server accepts connections. Exit codes: 0 after a graceful shutdown, 130
    after a second SIGINT. Raises InputError if the address cannot be bound, and what `Runtime` raises for a model that
    cannot run.
    """
    if engine.get("replicas") is not None:
        check_replicas(engine["replicas"])
    directory = _open_directory(settings)
    with _listening(settings, log_format) as listener:
        runtime = start_engine(model, settings, engine, _import_server)
        try:
            from plait.runtime.server.uvicorn_server import run

            settings = msgspec.structs.replace(settings, max_running=runtime.client.model.max_batch_rows)
            return run(runtime, settings, listener, directory)
        finally:
            runtime.shutdown()


def serve_models(
    specs: Sequence[ModelSpec],
    settings: ServerSettings,
    log_format: LogFormat = "json",
    keep: int | None = None,
    keep_bytes: int | None = None,
    keep_alive_s: float | None = None,
) -> int:
    """Serves several models, as `serve` does one; the engine of each starts with the first request for it.

    keep, keep_bytes, keep_alive_s: see `EnginePool`; keep is KEEP without a GPU by default, and 1 with one, since a
    runtime takes the free memory of its GPU.
    """
    from plait.runtime.server.engines.engine_pool import EnginePool

    if keep is None:
        keep = 1 if any(spec.is_on_gpu for spec in specs) else KEEP
    pool = EnginePool(specs, settings, keep, keep_bytes, keep_alive_s)
    directory = _open_directory(settings)
    with _listening(settings, log_format) as listener:
        try:
            from plait.runtime.server.uvicorn_server import run

            return run(pool, settings, listener, directory)
        finally:
            pool.shutdown()


def _open_directory(settings: ServerSettings) -> StateDirectory | None:
    """Opens the directory of files and batches, before a model is loaded, so that a fault is reported at once."""
    return StateDirectory(Path(settings.files_dir)) if settings.files_dir else None


def _listening(settings: ServerSettings, log_format: LogFormat) -> socket.socket:
    """Binds the address, before a model is loaded, so that a port in use is reported at once. Sets up log and spans."""
    listener = bind_listener(settings.host, settings.port, settings.write_timeout_s)
    set_up_log(log_format)
    export_spans()
    if not settings.api_keys and not is_loopback(listener):
        if settings.store_responses_s:
            listener.close()
            raise InputError("--store-responses needs API keys, or an address that only this machine can reach")
        log.warning("the server has no API key: anyone who can reach its address can use it")
    return listener


def _import_server() -> None:
    import plait.runtime.server.uvicorn_server  # noqa: F401
