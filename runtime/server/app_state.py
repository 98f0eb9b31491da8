"""What all routes of one application share: the models, the settings and counters; and a request's model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request

from plait.runtime.server.batches.batch_service import BatchService
from plait.runtime.server.engines.engine_pool import EnginePool
from plait.runtime.server.engines.model_names import DEFAULT_NAME
from plait.runtime.server.engines.pooled_model import PooledModel
from plait.runtime.server.engines.served_model import Backend, ServedModel
from plait.runtime.server.errors import NOT_FOUND, ApiError
from plait.runtime.server.http.admission import AdmissionControl
from plait.runtime.server.http.call_queue import CallQueue
from plait.runtime.server.http.response import KEEP_ALIVE_INTERVAL_S, cancel_on_disconnect
from plait.runtime.server.in_flight import InFlightRequests, RequestSize, current_request
from plait.runtime.server.ops.metrics import Metrics
from plait.runtime.server.response_store import ResponseStore
from plait.runtime.server.settings import ServerSettings
from plait.runtime.similar_names import did_you_mean

MAX_NAMES_IN_ERROR = 20


class AppState:
    """The shared state of one application. `state_of(request)` returns it.

    models: one for a backend, those of the models file for an `EnginePool`. pool: None for one model.
    """

    def __init__(self, backend: Backend | EnginePool, settings: ServerSettings) -> None:
        self.settings = settings
        self.started_at = int(time.time())
        self.in_flight = InFlightRequests()
        self.pool = backend if isinstance(backend, EnginePool) else None
        self.models: Sequence[ServedModel]
        if isinstance(backend, EnginePool):
            self.models = backend.models
        else:
            self.models = [ServedModel(settings, CallQueue(settings), backend)]
        self.admission = AdmissionControl(settings, self.in_flight, [model.queue for model in self.models])
        has_replicas = any(model.may_have_replicas for model in self.models)
        self.metrics = Metrics(has_replicas=has_replicas, has_models=self.pool is not None)
        self.batches: BatchService | None = None  # None: the server keeps no files and batches
        self.responses: ResponseStore | None = None  # None: the server stores no responses
        if settings.store_responses_s:
            limits = settings.max_response_bytes, settings.max_response_bytes_per_key
            self.responses = ResponseStore(settings.store_responses_s, *limits, settings.key_weights)

    @property
    def only_model(self) -> ServedModel | None:
        """The model of a server that has one; None for one that has several."""
        return self.models[0] if self.pool is None else None

    def find_model(self, name: str | None) -> ServedModel:
        """The model that `name` names or is an alias of; None and "default" mean the first one. Raises ApiError 404."""
        if name is None or name == DEFAULT_NAME:
            return self.models[0]
        for model in self.models:
            if name in model.names:
                return model
        text = f"the model '{name[:100]}' is not served here{self.served_names(name)}"
        raise ApiError(404, text, type=NOT_FOUND, param="model", code="model_not_found")

    def served_names(self, name: str) -> str:
        """Continues an error about the name of a model with those that are served."""
        names = [name for model in self.models for name in model.names]
        if len(names) == 1:
            return f"; '{names[0]}' is"
        rest = f" and {len(names) - MAX_NAMES_IN_ERROR} others" if len(names) > MAX_NAMES_IN_ERROR else ""
        return f"{did_you_mean(name, names)}; served are {', '.join(names[:MAX_NAMES_IN_ERROR])}{rest}"


async def use_model(request: Request, name: str | None, timeout_s: float | None = None) -> ServedModel:
    """The model called `name`; None and "default" mean the first one. It stays loaded until the request has ended.

    timeout_s: of the request, from now on. With several models: gives the request a place in the queue of its model,
    and waits until that is loaded, at most that long and as long as the client is connected. Raises ApiError 404, 429,
    503, and DeadlineExceeded.
    """
    state, record = state_of(request), current_request()
    model = state.find_model(name)
    assert record is not None
    record.model = model
    record.adapter = model.adapter_of(name)
    timeout_s = timeout_s if timeout_s is not None and timeout_s > 0 else None  # others are refused with their field
    if timeout_s is not None:
        record.start_deadline = time.monotonic() + timeout_s
    if state.pool is None or not isinstance(model, PooledModel):
        return model
    state.admission.enter_queue(record, model.queue)
    start, is_waiting = time.monotonic(), not model.accepts_requests
    if record.is_background and is_waiting:
        record.reserve_calls(RequestSize(0))  # lines of other batches may run meanwhile
    queue_time_s = math.inf if record.is_background else model.queue.max_queue_time_s or math.inf
    if record.place is not None:
        queue_time_s = record.place.latest_begin - start
    await cancel_on_disconnect(request, state.pool.acquire(model, timeout_s, record.is_background, queue_time_s))
    if is_waiting:
        record.wait_s += time.monotonic() - start
    record.on_end.append(partial(state.pool.release, model, record.is_background))
    return model


async def use_model_in_turn(request: Request, name: str | None, timeout_s: float | None = None) -> ServedModel:
    """As `use_model`, for a request that runs calls: waits for its turn, so that one that is refused costs little.

    After KEEP_ALIVE_INTERVAL_S it goes on: a stream that waits sends comments from then on.
    """
    model, record, admission = await use_model(request, name, timeout_s), current_request(), state_of(request).admission
    if record is not None and not admission.has_turn(record):
        await cancel_on_disconnect(request, admission.wait_for_turn(record, KEEP_ALIVE_INTERVAL_S))
    return model


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
