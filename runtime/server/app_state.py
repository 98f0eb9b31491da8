"""What all routes of one application share: the backend, the settings, counters and the model's name."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from starlette.requests import Request

from plait.runtime.client.client import Client
from plait.runtime.errors import RuntimeGone
from plait.runtime.server.errors import NOT_FOUND, ApiError
from plait.runtime.server.http.admission import AdmissionControl
from plait.runtime.server.in_flight import InFlightRequests
from plait.runtime.server.ops.metrics import Metrics
from plait.runtime.server.ops.status_query import StatusQuery
from plait.runtime.server.replicated_runtime import ReplicatedRuntime
from plait.runtime.server.settings import ServerSettings

REPLACEMENT_POLL_S = 0.02


class Backend(Protocol):
    """What an application serves: a Runtime, an Engine, a RestartingRuntime or a ReplicatedRuntime."""

    @property
    def client(self) -> Client:
        """The connection to the runtime. Raises RuntimeGone, or is closed, while there is none."""
        ...


class AppState:
    """The shared state of one application. `state_of(request)` returns it."""

    def __init__(self, backend: Backend, settings: ServerSettings) -> None:
        self.backend, self.settings = backend, settings
        self.started_at = int(time.time())
        self.in_flight = InFlightRequests()
        self.admission = AdmissionControl(settings, self.in_flight)
        self.replicated = backend if isinstance(backend, ReplicatedRuntime) else None
        self.metrics = Metrics(has_replicas=self.replicated is not None)
        self.status_query = StatusQuery(lambda: self.client)
        self._replacement: asyncio.Task[None] | None = None  # waits for the next runtime, for all requests
        self.last_model_name = ""  # for metrics and status while the runtime restarts
        with contextlib.suppress(RuntimeGone):
            self.last_model_name = self.model_name

    @property
    def client(self) -> Client:
        """The connection to the runtime. Raises RuntimeGone, or is closed, while there is none."""
        return self.backend.client

    @property
    def replaces_runtime(self) -> bool:
        """Whether the backend starts another runtime when one ends."""
        return not getattr(self.backend, "has_given_up", True)

    async def wait_for_replacement(self, timeout_s: float) -> bool:
        """Waits until the runtime that ended is replaced. Returns False after `timeout_s`, and if it will not be."""
        if self._replacement is None or self._replacement.done():
            self._replacement = asyncio.create_task(self._poll_backend())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._replacement), timeout_s)
            return self.replaces_runtime
        return False

    async def _poll_backend(self) -> None:
        while self.replaces_runtime and self.client.is_closed:
            await asyncio.sleep(REPLACEMENT_POLL_S)

    @property
    def num_restarts(self) -> int:
        """How many times the backend replaced a runtime that died."""
        num_restarts: int = getattr(self.backend, "num_restarts", 0)
        return num_restarts

    @property
    def model_name(self) -> str:
        """The name by which clients call the model. Raises RuntimeGone."""
        return self.settings.model_name or _name_from_path(self.client.model.model_path)

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served here. "default" means the one that is."""
        if name not in (self.model_name, "default"):
            text = f"the model '{name[:100]}' is not served here; '{self.model_name}' is"
            raise ApiError(404, text, type=NOT_FOUND, param="model", code="model_not_found")


@lru_cache(maxsize=8)
def _name_from_path(model_path: str) -> str:
    return Path(model_path).name.removesuffix(".gguf")


def state_of(request: Request) -> AppState:
    """The state of the application that handles `request`."""
    state: AppState = request.app.state.plait
    return state


def request_id(request: Request) -> str:
    """The id that RequestContextMiddleware gave this request."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id


def tenant_of(request: Request) -> str:
    """The name of the request's API key, which names its prefix cache; "" for a server without keys."""
    tenant: str = request.scope["state"].get("tenant", "")
    return tenant
