"""One model of a server, as routes use it: its name, its engine's client, its queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

from plait.runtime.client.client import Client
from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import Welcome
from plait.runtime.server.engines.model_names import DEFAULT_NAME
from plait.runtime.server.engines.replicated_runtime import ReplicaGroup
from plait.runtime.server.engines.status_query import StatusQuery
from plait.runtime.server.http.call_queue import CallQueue
from plait.runtime.server.settings import ServerSettings

REPLACEMENT_POLL_S = 0.02

ModelStatus = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class Backend(Protocol):
    """The engine of one model: a Runtime, an Engine, a RestartingRuntime or a ReplicaGroup."""

    @property
    def client(self) -> Client:
        """The connection to the runtime. Raises RuntimeGone, or is closed, while there is none."""
        ...


class ServedModel:
    """A model whose engine runs as long as the server. `backend.client` is read for each request, so a backend may
    replace the client of a runtime that died."""

    def __init__(self, settings: ServerSettings, queue: CallQueue, backend: Backend | None) -> None:
        self.settings, self.queue, self.backend = settings, queue, backend
        self.status_query = StatusQuery(lambda: self.client)
        self._replacement: asyncio.Task[None] | None = None  # waits for the next runtime, for all requests
        self._last_name = ""
        with contextlib.suppress(RuntimeGone):
            self._last_name = self.name

    @property
    def client(self) -> Client:
        """The connection to the runtime. Raises RuntimeGone, or is closed, while there is none."""
        if self.backend is None:
            raise RuntimeGone("the model is not loaded")
        return self.backend.client

    @property
    def name(self) -> str:
        """The name by which clients call the model. Raises RuntimeGone."""
        return self.settings.model_name or name_from_path(self.client.model.model_path)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of the model."""
        return self.settings.aliases

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters, by which clients call them. May raise RuntimeGone."""
        return tuple(self.client.model.adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which clients call the model and its adapters. Raises RuntimeGone."""
        return tuple(dict.fromkeys((self.name, *self.aliases, *self.adapters)))

    def adapter_of(self, name: str | None) -> str:
        """The adapter that clients call by a name of the model; "": the model alone, as by a name that it has itself.

        Raises RuntimeGone.
        """
        if name is None or name in (DEFAULT_NAME, *self.aliases) or name == self.name:
            return ""
        return name if name in self.adapters else ""

    @property
    def last_name(self) -> str:
        """The name for metrics and status, also while the runtime restarts."""
        with contextlib.suppress(RuntimeGone):
            return self.name
        return self._last_name

    @property
    def info(self) -> Welcome | None:
        """What the engine reported when it was last loaded; None if it never was. May raise RuntimeGone."""
        return self.client.model

    @property
    def template_source(self) -> str:
        """The chat template, in Jinja; "" without one. May raise RuntimeGone."""
        template = self.client.tokenizer.chat_template
        return template.source if template is not None else ""

    @property
    def status(self) -> ModelStatus:
        """Whether the engine is loaded. A runtime that is being replaced is loading."""
        try:
            is_closed = self.client.is_closed
        except RuntimeGone:
            return "failed"
        return ("loading" if self.replaces_runtime else "failed") if is_closed else "loaded"

    @property
    def replicated(self) -> ReplicaGroup | None:
        """The engine, if it has replicas."""
        return self.backend if isinstance(self.backend, ReplicaGroup) else None

    @property
    def may_have_replicas(self) -> bool:
        """Whether the engine, loaded or not, has replicas."""
        return self.replicated is not None

    @property
    def num_restarts(self) -> int:
        """How many times the engine replaced a runtime that died."""
        num_restarts: int = getattr(self.backend, "num_restarts", 0)
        return num_restarts

    @property
    def replaces_runtime(self) -> bool:
        """Whether the engine starts another runtime when one ends."""
        return not getattr(self.backend, "has_given_up", True)

    async def wait_for_replacement(self, timeout_s: float) -> bool:
        """Waits until the runtime that ended is replaced. Returns False after `timeout_s` (infinity: never), and if
        it will not be."""
        if self._replacement is None or self._replacement.done():
            self._replacement = asyncio.create_task(self._poll_backend())
        with contextlib.suppress(TimeoutError):
            limit_s = timeout_s if timeout_s < math.inf else None
            await asyncio.wait_for(asyncio.shield(self._replacement), limit_s)
            return self.replaces_runtime
        return False

    async def _poll_backend(self) -> None:
        with contextlib.suppress(RuntimeGone):  # there will be none, since a moment ago
            while self.replaces_runtime and self.client.is_closed:
                await asyncio.sleep(REPLACEMENT_POLL_S)


@lru_cache(maxsize=8)
def name_from_path(model_path: str) -> str:
    """The name of a model without a --model-name."""
    return Path(model_path).name.removesuffix(".gguf")
