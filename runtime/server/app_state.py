"""What every route of one application shares: the backend, the settings, and the model's name.

Knows: where these are kept in a request. Must not know: routes, JSON.
"""

from __future__ import annotations

import contextlib
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request

from plait.runtime.client.client import Client
from plait.runtime.errors import RuntimeGone
from plait.runtime.server.errors import NOT_FOUND, ApiError
from plait.runtime.server.http.admission import AdmissionControl
from plait.runtime.server.in_flight import InFlightRequests
from plait.runtime.server.ops.liveness import LivenessProbe
from plait.runtime.server.ops.metrics import Metrics
from plait.runtime.server.settings import ServerSettings

if TYPE_CHECKING:
    from plait.runtime.server.app import Backend


class AppState:
    """One application's; `state_of(request)` finds it."""

    def __init__(self, backend: Backend, settings: ServerSettings) -> None:
        self.backend, self.settings = backend, settings
        self.started_at = int(time.time())
        self.in_flight = InFlightRequests()
        self.admission = AdmissionControl(settings, self.in_flight)
        self.metrics = Metrics()
        self.liveness = LivenessProbe(lambda: self.client, settings.stuck_after_s)
        self.last_model_name = ""  # also known while the runtime is being started again
        with contextlib.suppress(RuntimeGone):
            self.last_model_name = self.model_name

    @property
    def client(self) -> Client:
        """The connection to the runtime. Raises RuntimeGone while there is none."""
        return self.backend.client

    @property
    def num_restarts(self) -> int:
        """Times that the backend put a new runtime in the place of one that died."""
        number: int = getattr(self.backend, "num_restarts", 0)
        return number

    @property
    def model_name(self) -> str:
        """What the model is called here."""
        return self.settings.model_name or _name_of(self.client.model.model_path)

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served here; "default" is whatever is."""
        if name not in (self.model_name, "default"):
            text = f"the model '{name[:100]}' is not served here; '{self.model_name}' is"
            raise ApiError(404, text, type=NOT_FOUND, param="model", code="model_not_found")


@lru_cache(maxsize=8)
def _name_of(model_path: str) -> str:
    return Path(model_path).name.removesuffix(".gguf")


def state_of(request: Request) -> AppState:
    """The application's state."""
    state: AppState = request.app.state.plait
    return state


def request_id(request: Request) -> str:
    """The id that the observer gave this request."""
    name: str = request.scope["state"]["request_id"]
    return name


def tenant_of(request: Request) -> str:
    """Whose request this is: what names its prefix cache. Set by whoever checks keys; one tenant without."""
    name: str = request.scope["state"].get("tenant", "")
    return name
