"""An ingress over replicas of this machine without Ray: "a" is reached by its Unix sockets, "b" through a tunnel."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import uvicorn
from waiting import wait_until

from plait.runtime.server.deployment.deploy_config import DeployConfig
from plait.runtime.server.deployment.listed_replicas import tell_replicas
from plait.runtime.server.deployment.replica_address import ReplicaAddress
from plait.runtime.server.engines.restarting_runtime import RestartingRuntime
from plait.runtime.server.settings import server_settings
from plait.runtime.transport.tunnel import SECRET_BYTES, TunnelServer

THROUGH_TUNNEL = "b"


class LocalReplicas:
    """The replicas, and the ingress that serves them in a thread. models: of replicas with another one than `model`."""

    def __init__(self, model: str | None, models: dict[str, str], ids: Sequence[str], **settings: Any) -> None:
        self.runtimes = {
            name: RestartingRuntime(models.get(name, model), name=name, progress=False, **settings) for name in ids
        }
        self.tunnels: list[TunnelServer] = []
        self.is_tunnel_open = True
        self._stop, self._loop = asyncio.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._server: uvicorn.Server | None = None
        tell_replicas(ids)
        self._thread.start()
        assert wait_until(lambda: self._server is not None and self._server.started)
        assert self._server is not None
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    async def _serve(self) -> None:
        from plait.runtime.server.deployment.ingress import connected_application  # imports Ray Serve

        config = DeployConfig(server=server_settings(stuck_after_s=60))
        self.app, self.directory = await connected_application(config, self._find_address, None)
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        await self._server.serve()
        await self.directory.close()
        for tunnel in self.tunnels:
            await tunnel.close()

    async def _find_address(self, name: str) -> ReplicaAddress:
        runtime = self.runtimes[name]
        if name != THROUGH_TUNNEL:
            return ReplicaAddress(runtime.address)
        if not self.is_tunnel_open:
            raise ConnectionError("the machine is not reachable")
        tunnel = TunnelServer(lambda: runtime.address, secret := os.urandom(SECRET_BYTES))
        self.tunnels.append(tunnel)
        return ReplicaAddress("", "127.0.0.1", await tunnel.start("127.0.0.1"), secret)

    def process(self, name: str) -> psutil.Process:
        """The runtime process of a replica."""
        return psutil.Process(self.runtimes[name].client.model.server_pid)

    def ask(self, prompt: str, **fields: Any) -> httpx.Response:
        """A greedy completion of eight tokens."""
        body = {"model": "default", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        return self.http.post("/v1/completions", json=body)

    def stream(self, prompt: str, **fields: Any) -> Iterator[str]:
        """The events of a streamed completion."""
        body = {"model": "default", "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            yield from (line.removeprefix("data: ") for line in answer.iter_lines() if line)

    def reports(self) -> list[dict[str, Any]]:
        return self.http.get("/status").json()["replicas"]

    def placed(self) -> list[int]:
        return [replica["placed"] for replica in self.reports()]

    def states(self) -> list[str]:
        return [replica["state"] for replica in self.reports()]

    def is_idle(self) -> bool:
        reports = self.reports()
        return len(reports) == len(self.runtimes) and all(
            report["state"] == "ready" and not report["load"] and not report["runtime"]["used_pages"]
            for report in reports
        )

    def close(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join(60)
        tell_replicas([])
        for runtime in self.runtimes.values():
            runtime.shutdown()


@contextmanager
def local_replicas(
    model: str | None = None, models: dict[str, str] | None = None, ids: Sequence[str] = ("a", "b"), **settings: Any
) -> Iterator[LocalReplicas]:
    """Starts replicas, and an ingress over them, for the block."""
    replicas = LocalReplicas(model, models or {}, ids, **settings)
    try:
        yield replicas
    finally:
        replicas.close()
