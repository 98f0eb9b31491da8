"""Replicas of a deployment in this process, over one engine, that fail on demand; and an ingress in front of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from plait.runtime.messages import BlockBatch
from plait.runtime.server.app import create_app
from plait.runtime.server.deployment.deploy_config import DeployConfig
from plait.runtime.server.deployment.forwarded import decode_request
from plait.runtime.server.deployment.ingress import ingress_application
from plait.runtime.server.deployment.replica_directory import ReplicaDirectory
from plait.runtime.server.deployment.replica_run import ReplicaRun
from plait.runtime.server.settings import ServerSettings

HEARTBEAT_S = 0.05
encode = msgspec.msgpack.encode


class LocalReplicas:
    """A `ReplicaPort`. faults: of each replica: "dead" (at the next request), "silent", "cut" (its answers end after
    the first part), or the seconds that each of its frames takes. models: fingerprints of replicas with other files."""

    def __init__(self, engine: Any, settings: ServerSettings, models: dict[str, str] | None = None) -> None:
        self.engine, self.app = engine, create_app(engine, settings)
        self.models = models or {}
        self.faults: dict[str, str | float] = {}
        self.has_died: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.open: Counter[str] = Counter()

    async def answer(self, replica: str, data: bytes) -> AsyncGenerator[bytes, None]:
        self.asked[replica] += 1
        self.open[replica] += 1
        try:
            fault = self.faults.get(replica)
            if fault == "dead":
                self.has_died.add(replica)
                raise OSError("The actor died unexpectedly before finishing this task.")
            if fault == "silent":
                await asyncio.get_running_loop().create_future()
            run = ReplicaRun(self._call_endpoint, self.app.state.plait, decode_request(data))
            num_bodies = 0
            async with contextlib.aclosing(run.frames()) as frames:
                async for frame in frames:
                    if isinstance(fault, float):
                        await asyncio.sleep(fault)
                    yield frame
                    num_bodies += b"Body" in frame
                    if fault == "cut" and num_bodies:
                        raise OSError("The actor died unexpectedly before finishing this task.")
        finally:
            self.open[replica] -= 1

    async def _call_endpoint(self, scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = self.app
        await self.app.endpoint_table(scope, receive, send)

    async def watch(self, replica: str, watch: str) -> AsyncGenerator[bytes, None]:
        model = self.engine.client.model
        if replica in self.models:
            model = msgspec.structs.replace(model, model_fingerprint=self.models[replica])
        yield encode([model])
        for sequence in range(1, 1_000_000):
            while self.faults.get(replica) == "silent":
                await asyncio.sleep(HEARTBEAT_S)
            if self.faults.get(replica) == "dead" and replica in self.has_died:
                raise OSError("The actor died.")
            yield encode([self.engine.client.status(), BlockBatch(1, sequence, [], [])])
            await asyncio.sleep(HEARTBEAT_S)

    async def renew(self, replica: str, watch: str, snapshot: bool) -> None:
        return


class IngressApp:
    """The ASGI application of an ingress over `replicas`, built in the loop that serves it."""

    def __init__(self, replicas: LocalReplicas, settings: ServerSettings, ids: list[str]) -> None:
        self.replicas, self.settings, self.ids = replicas, settings, ids
        self._app: Any = None
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._lock:
            if self._app is None:
                directory = self.directory = ReplicaDirectory(self.replicas)
                config = DeployConfig(server=self.settings)
                self._app = ingress_application(config, directory, self.replicas)
                directory.update(self.ids)
                assert await directory.wait_until_connected(60)
                expected = [replica for replica in self.ids if replica not in self.replicas.models]
                while len(directory.listed()) < len(expected):
                    await asyncio.sleep(0.01)
        await self._app(scope, receive, send)
