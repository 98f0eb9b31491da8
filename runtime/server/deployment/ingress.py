"""`Ingress`: the deployment of Ray Serve that answers HTTP: the server's application, over replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from plait.runtime.cluster.router import WINDOW_TOKENS
from plait.runtime.server.app import Application, create_app
from plait.runtime.server.deployment.deploy_config import DeployConfig
from plait.runtime.server.deployment.forwarder import Forwarder
from plait.runtime.server.deployment.listed_replicas import listen_to_replicas
from plait.runtime.server.deployment.replica_directory import ReplicaDirectory, ReplicaPort
from plait.runtime.server.deployment.serve_port import ServePort
from plait.runtime.server.ops.request_log import set_up_log
from plait.runtime.server.replicated_runtime import CPU_WINDOW_TOKENS

FIRST_REPLICA_TIMEOUT_S = 3600.0  # a large model may be downloaded and loaded


def ingress_application(config: DeployConfig, directory: ReplicaDirectory, port: ReplicaPort) -> Application:
    """Returns the server's application, whose requests run on the replicas of `directory`."""
    app = create_app(directory, config.server)
    app.endpoint_table.run_endpoint = Forwarder(directory, port).run
    directory.on_change = lambda rows: app.state.plait.models[0].queue.control.set_max_running(max(1, rows))
    return app


class Ingress:
    """Is ready when the first replica has connected. config: a `DeployConfig` as JSON."""

    async def __init__(self, config: bytes, engines: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        settings = msgspec.json.decode(config, type=DeployConfig)
        set_up_log("json")
        loop, port = asyncio.get_running_loop(), ServePort(engines)
        window_tokens = WINDOW_TOKENS if settings.gpus else CPU_WINDOW_TOKENS
        self._directory = ReplicaDirectory(port, window_tokens)
        self._app = ingress_application(settings, self._directory, port)

        def on_replicas(ids: Sequence[str]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the ingress ends
                loop.call_soon_threadsafe(self._directory.update, ids)

        listen_to_replicas(on_replicas)
        self._first_call = asyncio.create_task(port.start())
        await self._directory.wait_until_connected(FIRST_REPLICA_TIMEOUT_S)

    def __del__(self) -> None:
        """Called by Ray Serve when the ingress ends: lets the replicas end at once, without its watches."""
        directory = getattr(self, "_directory", None)
        if directory is not None:
            directory.close()

    def __serve_build_asgi_app__(self) -> Application:
        """Called by Ray Serve for the application that answers its requests."""
        return self._app
