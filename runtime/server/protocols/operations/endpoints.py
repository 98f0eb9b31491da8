"""Endpoints for operators, load balancers and the page: /health, /ready, /metrics and /status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.cluster.replicated_client import sum_of
from plait.runtime.errors import PlaitError
from plait.runtime.messages import Status
from plait.runtime.server.app_state import AppState, state_of, tenant_of
from plait.runtime.server.engines.pooled_model import PooledModel
from plait.runtime.server.engines.replicated_runtime import ReplicaReport, ReplicaState, total_status
from plait.runtime.server.engines.restarting_runtime import NOT_READY_AFTER_S
from plait.runtime.server.engines.served_model import ModelStatus, ServedModel
from plait.runtime.server.errors import OVERLOADED, ApiError
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.ops import prometheus
from plait.runtime.server.ops.metrics import Metrics

router = APIRouter()

MAX_LISTED = 50  # requests in /status


class Health(msgspec.Struct):
    """The server is alive."""

    status: str = "ok"


class Ready(msgspec.Struct):
    """The server admits requests."""

    ready: bool = True


class RunningRequest(msgspec.Struct):
    """A request in flight. `tokens`: the number generated so far. `model`: null until it is known."""

    id: str
    route: str
    seconds: float
    tokens: int
    model: str | None


class Counts(msgspec.Struct):
    """The scheduler's counters; see `messages.Status`. Token counts only grow until the runtime restarts."""

    sessions: int
    running_calls: int
    waiting_calls: int
    free_pages: int
    cached_pages: int
    used_pages: int
    total_pages: int
    steps: int
    computed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    forced_tokens: int


class ReplicaStatus(msgspec.Struct):
    """One replica of a server with `--replicas`, or of `plait deploy`.

    state: "ready", "unanswered", "restarting", "refused" (its model is another one) or "ended". load: of its calls that
    have not ended, in prompt tokens; an output token counts as four. placed: sessions placed on it so far.
    """

    number: int
    state: ReplicaState
    restarts: int
    load: int
    placed: int
    runtime: Counts | None


class StatusOfModel(msgspec.Struct):
    """One model of a server with `--models`. `requests`: that use it. `waiting`: requests that wait for its start.
    `error`: of its last start, if that failed."""

    name: str
    status: ModelStatus
    requests: int
    waiting: int
    restarts: int
    error: str | None
    runtime: Counts | None
    replicas: list[ReplicaStatus]


class ServerStatus(msgspec.Struct):
    """`requests`: at most 50 of the caller's own key, the oldest first. `runtime` is null while it does not answer.

    With `--replicas`, `runtime` has the sums of the replicas that answer, and `replicas` one entry for each. With
    `--models`, `runtime` has the sums over the loaded models, and `models` one entry for each; `model` is the first.
    """

    model: str | None
    ready: bool
    in_flight: int
    restarts: int
    requests: list[RunningRequest]
    runtime: Counts | None
    replicas: list[ReplicaStatus]
    models: list[StatusOfModel]


@router.get("/health", **documented(answer=Health, errors=(500, 503)))
async def health(request: Request) -> Response:
    """Whether this process runs, and replaces a runtime that ends. Does not ask the runtime."""
    state = state_of(request)
    model = state.only_model
    if model is not None and model.status == "failed" and (reason := _engine_problem(model)):
        raise _unavailable(state, *reason)
    return json_response(Health())


@router.get("/ready", **documented(answer=Ready, errors=(500, 503)))
async def ready(request: Request) -> Response:
    """Whether a request would be admitted now, and the runtime answers."""
    state = state_of(request)
    if reason := _not_ready_reason(state):
        raise _unavailable(state, *reason)
    return json_response(Ready())


@router.get("/metrics", **documented(answer=str, errors=(401, 500), media_type=prometheus.CONTENT_TYPE))
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    state = state_of(request)
    reports = await asyncio.gather(*(_report(model) for model in state.models))
    state.metrics.forget_engines()
    for model, (counts, replicas) in zip(state.models, reports, strict=True):
        _set_metrics(state.metrics, model, counts, replicas)
    return Response(state.metrics.scrape(state.in_flight), media_type=prometheus.CONTENT_TYPE)


def _set_metrics(
    metrics: Metrics, model: ServedModel, counts: Status | None, replicas: Sequence[ReplicaReport]
) -> None:
    name, replicated = model.last_name, model.replicated
    metrics.set_num_waiting(name, model.queue.num_waiting)
    if isinstance(model, PooledModel):
        metrics.set_model(name, model.status == "loaded", model.num_starts, model.num_failed_starts)
    if replicated is not None:
        metrics.set_replicas(replicas, name, replicated.num_spread)
    elif model.backend is not None:
        unanswered_s = None
        with contextlib.suppress(PlaitError):
            unanswered_s = model.client.unanswered_s
        num_waiting = model.queue.num_waiting
        metrics.set_runtime(counts, name, model.num_restarts, unanswered_s, num_waiting=num_waiting)


@router.get("/status", **documented(answer=ServerStatus, errors=(401, 500)))
async def status(request: Request) -> Response:
    """The requests and counters of this moment, for the page at "/"."""
    state, tenant = state_of(request), tenant_of(request)
    records = [record for record in state.in_flight.records if record.is_admitted and record.tenant == tenant]
    records.sort(key=lambda record: record.start_time)
    requests = [
        RunningRequest(r.request_id, r.route, round(r.wall_s, 3), r.num_tokens, r.model.last_name if r.model else None)
        for r in records[:MAX_LISTED]
    ]
    reports = await asyncio.gather(*(_report(model) for model in state.models))
    counts = [counts for counts, _ in reports if counts is not None]
    server_status = ServerStatus(
        model=state.models[0].last_name or None,
        ready=_not_ready_reason(state) is None,
        in_flight=state.in_flight.num_admitted,
        restarts=sum(model.num_restarts for model in state.models),
        requests=requests,
        runtime=_counts(sum_of(counts) if counts else None),
        replicas=_replicas(reports[0][1]) if state.pool is None else [],
        models=[
            _status_of_model(model, *report)
            for model, report in zip(state.models, reports, strict=True)
            if isinstance(model, PooledModel)
        ],
    )
    return json_response(server_status, headers={"cache-control": "no-store"})


def _counts(status: Status | None) -> Counts | None:
    return None if status is None else msgspec.convert(status, Counts, from_attributes=True)


def _replicas(reports: Sequence[ReplicaReport]) -> list[ReplicaStatus]:
    return [ReplicaStatus(r.number, r.state, r.restarts, r.load, r.placed, _counts(r.status)) for r in reports]


def _status_of_model(model: PooledModel, counts: Status | None, replicas: Sequence[ReplicaReport]) -> StatusOfModel:
    error = model.failure.cause if model.failure is not None else None
    waiting = sum(not waiter.done() for waiter in model.waiters)
    numbers = (model.num_running, waiting, model.num_restarts)
    return StatusOfModel(model.name, model.status, *numbers, error, _counts(counts), _replicas(replicas))


async def _report(model: ServedModel) -> tuple[Status | None, Sequence[ReplicaReport]]:
    """The scheduler's counters, None while it does not answer, and the state of each replica, if there are any."""
    if model.replicated is not None:
        reports = await model.replicated.reports()
        return total_status(reports), reports
    if model.backend is None:
        return None, []
    try:
        return await model.status_query.status(), []
    except PlaitError:
        return None, []


def _not_ready_reason(state: AppState) -> tuple[str, str] | None:
    """The message and error code of why requests are not admitted now; None if they are, for one model at least."""
    if state.admission.is_draining:
        return "the server is shutting down", "draining"
    reasons = [_engine_problem(model) for model in state.models]
    if all(reasons):
        return reasons[0]
    return ("the queue is full", "queue_full") if state.admission.is_full else None


def _engine_problem(model: ServedModel) -> tuple[str, str] | None:
    """The message and error code of why an engine does not answer; None if it does, or would be started."""
    if isinstance(model, PooledModel) and model.backend is None:
        error = model.start_error() if model.is_paused else None
        return (error.message, "model_start_failed") if error is not None else None
    try:
        client = model.client
    except PlaitError as error:
        return str(error), "runtime_gone"
    if client.is_closed:
        return "the runtime process has ended", "runtime_gone"
    if client.unanswered_s >= NOT_READY_AFTER_S:
        return "the model's runtime does not answer", "runtime_unhealthy"
    return None


def _unavailable(state: AppState, text: str, code: str) -> ApiError:
    headers = {"Retry-After": str(state.settings.retry_after_s)}
    return ApiError(503, text, type=OVERLOADED, code=code, headers=headers)
