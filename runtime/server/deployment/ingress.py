"""The deployment of Ray Serve that answers HTTP: the server of `plait serve`, over the runtimes of the replicas.

A `ListeningIngress` accepts connections itself. A `ProxiedIngress` is an application behind Ray Serve's own proxies,
for where these must be the entry (KubeRay).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plait.runtime.cluster.router import WINDOW_TOKENS
from plait.runtime.errors import InputError, RuntimeGone
from plait.runtime.executor.host_machine import trim_heap
from plait.runtime.server.app import Application, create_app
from plait.runtime.server.deployment.deploy_config import DeployConfig
from plait.runtime.server.deployment.listed_replicas import listen_to_replicas
from plait.runtime.server.deployment.replica_directory import FindAddress, ReplicaDirectory
from plait.runtime.server.deployment.serve_port import ServePort
from plait.runtime.server.engines.replicated_runtime import CPU_WINDOW_TOKENS
from plait.runtime.server.graceful_shutdown import GracefulServer
from plait.runtime.server.listener import bind_listener
from plait.runtime.server.ops.request_log import set_up_log
from plait.runtime.server.settings import ServerSettings
from plait.runtime.server.uvicorn_server import loop_factory, make_server

FIRST_REPLICA_TIMEOUT_S = 3600.0  # a large model may be downloaded and loaded
BIND_TIMEOUT_S, BIND_POLL_S = 10.0, 0.1


@dataclass(frozen=True)
class IngressPlace:
    """On which node of Ray an ingress runs. tls: a context for connections to other nodes, if Ray itself uses TLS."""

    node_id: str
    tls: ssl.SSLContext | None = None


async def connected_application(
    config: DeployConfig, find_address: FindAddress, tls: ssl.SSLContext | None
) -> tuple[Application, ReplicaDirectory]:
    """Returns the server's application, over the replicas that Ray Serve lists, when the first one has connected."""
    window_tokens = WINDOW_TOKENS if config.gpus else CPU_WINDOW_TOKENS
    directory = ReplicaDirectory(find_address, window_tokens, config.server.stuck_after_s, tls)
    loop = asyncio.get_running_loop()

    def on_replicas(ids: Sequence[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the ingress ends
            loop.call_soon_threadsafe(directory.update, ids)

    listen_to_replicas(on_replicas)
    if not await directory.wait_until_connected(FIRST_REPLICA_TIMEOUT_S):
        raise RuntimeGone(f"no replica has connected in {FIRST_REPLICA_TIMEOUT_S:g} s")
    app = create_app(directory, config.server)

    def set_max_running(rows: int) -> None:
        app.state.plait.models[0].queue.set_max_running(max(1, rows))

    directory.on_change = set_max_running
    set_max_running(directory.max_batch_rows)
    return app, directory


def _read_arguments(
    config: bytes, engines: Any, find_place: Callable[[], IngressPlace]
) -> tuple[DeployConfig, FindAddress, ssl.SSLContext | None]:
    """Returns what `connected_application` needs. Call it in the event loop of Ray Serve. Sets up the log."""
    set_up_log("json")
    place = find_place()
    port = ServePort(engines, place.node_id, asyncio.get_running_loop())
    return msgspec.json.decode(config, type=DeployConfig), port.find_address, place.tls


class ProxiedIngress:
    """Is ready when the first replica has connected. config: a `DeployConfig` as JSON. engines: a handle of Ray Serve.

    find_place: called in the process of the ingress.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: bytes, engines: Any, find_place: Callable[[], IngressPlace]
    ) -> None:
        settings, find_address, tls = _read_arguments(config, engines, find_place)
        self._app, self._directory = await connected_application(settings, find_address, tls)

    async def check_health(self) -> None:
        """Raises RuntimeGone if it cannot use any replica that is left, so that Ray Serve replaces this ingress."""
        _check_usable(self._directory)

    def __serve_build_asgi_app__(self) -> Application:
        """Called by Ray Serve for the application that answers its requests."""
        return self._app


class ListeningIngress:
    """Accepts connections at the address of its configuration, in a thread with an event loop of its own.

    Is ready when it listens, after the first replica has connected. The arguments are those of `ProxiedIngress`. Raises
    InputError if the address cannot be used.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: bytes, engines: Any, find_place: Callable[[], IngressPlace]
    ) -> None:
        arguments = _read_arguments(config, engines, find_place)
        self._server: GracefulServer | None = None
        self._directory: ReplicaDirectory | None = None
        self._server_loop: asyncio.AbstractEventLoop | None = None
        self._is_listening, self._has_ended = concurrent.futures.Future[None](), asyncio.Event()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    runner.run(self._serve(*arguments))
            except BaseException as error:
                if not self._is_listening.done():
                    self._is_listening.set_exception(error)
            finally:
                loop.call_soon_threadsafe(self._has_ended.set)

        threading.Thread(target=run, name="plait-ingress", daemon=True).start()
        await asyncio.wrap_future(self._is_listening)

    async def _serve(self, config: DeployConfig, find_address: FindAddress, tls: ssl.SSLContext | None) -> None:
        self._server_loop = asyncio.get_running_loop()
        app, directory = await connected_application(config, find_address, tls)
        listener = await _bind(config.server)
        self._directory = directory
        self._server = make_server(app, config.server, listener)
        trim_heap()
        gc.collect()
        gc.freeze()  # as in `plait serve`: collections skip the tokenizer
        self._is_listening.set_result(None)
        await self._server.serve(sockets=[listener])
        await directory.close()

    async def check_health(self) -> None:
        """Raises RuntimeGone if the server has ended or cannot use any replica that is left, so that Ray Serve replaces
        this ingress.

        Waits for a turn of the server's event loop: if that stands still, Ray Serve's timeout ends the check.
        """
        if self._has_ended.is_set() or self._server_loop is None:
            raise RuntimeGone("the HTTP server of the ingress has ended")
        if self._directory is not None:
            _check_usable(self._directory)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._server_loop))

    def __del__(self) -> Coroutine[Any, Any, bool] | None:
        """Called, and awaited, by Ray Serve when the ingress leaves: accepts no more connections, so that the next
        ingress can listen, and waits until the requests have ended."""
        server, self._server = getattr(self, "_server", None), None
        if server is None:
            return None
        with contextlib.suppress(RuntimeError):  # its loop is closed: the server has ended
            server.stop()
        return self._has_ended.wait()


def _check_usable(directory: ReplicaDirectory) -> None:
    """Raises RuntimeGone if no replica that is left can be used."""
    if directory.has_given_up:
        raise RuntimeGone("all replicas have another model or chat template than this ingress serves")


async def _bind(settings: ServerSettings) -> socket.socket:
    """Listens at the address. Waits for the ingress whose place this one takes, which may still listen there."""
    deadline = time.monotonic() + BIND_TIMEOUT_S
    while True:
        try:
            return bind_listener(settings.host, settings.port, settings.write_timeout_s)
        except InputError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(BIND_POLL_S)
