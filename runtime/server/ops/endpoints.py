"""Endpoints for operators, load balancers and the page: /health, /ready, /metrics and /status."""

from __future__ import annotations

import contextlib

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.errors import PlaitError
from plait.runtime.messages import Status
from plait.runtime.server.app_state import AppState, state_of, tenant_of
from plait.runtime.server.errors import OVERLOADED, ApiError
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.ops import prometheus
from plait.runtime.server.replicated_runtime import ReplicaState, total_status
from plait.runtime.server.restarting_runtime import NOT_READY_AFTER_S

router = APIRouter()

MAX_LISTED = 50  # requests in /status


class Health(msgspec.Struct):
    """The server is alive."""

    status: str = "ok"


class Ready(msgspec.Struct):
    """The server admits requests."""

    ready: bool = True


class RunningRequest(msgspec.Struct):
    """A request in flight. `tokens`: the number generated so far."""

    id: str
    route: str
    seconds: float
    tokens: int


class Counts(msgspec.Struct):
    """The scheduler's counters; see `messages.Status`. Token counts only grow until the runtime restarts."""

    sessions: int
    running_calls: int
    waiting_calls: int
    free_pages: int
    cached_pages: int
    held_pages: int
    total_pages: int
    steps: int
    computed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    forced_tokens: int


class ReplicaStatus(msgspec.Struct):
    """One replica of a server with `--replicas`.

    state: "ready", "unanswered", "restarting" or "ended". load: of its calls that have not ended, in prompt tokens; an
    output token counts as four. placed: sessions placed on it so far.
    """

    number: int
    state: ReplicaState
    restarts: int
    load: int
    placed: int
    runtime: Counts | None


class ServerStatus(msgspec.Struct):
    """`requests`: at most 50 of the caller's own key, the oldest first. `runtime` is null while it does not answer.

    With `--replicas`, `runtime` has the sums of the replicas that answer, and `replicas` one entry for each.
    """

    model: str | None
    ready: bool
    in_flight: int
    restarts: int
    requests: list[RunningRequest]
    runtime: Counts | None
    replicas: list[ReplicaStatus]


@router.get("/health", **documented(answer=Health, errors=(500, 503)))
async def health(request: Request) -> Response:
    """Whether this process runs, and replaces a runtime that ends. Does not ask the runtime."""
    state = state_of(request)
    if state.client.is_closed and not state.replaces_runtime:
        raise _unavailable(state, "the model's runtime process has ended", "runtime_gone")
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
    metrics, name, queue_time_s = state.metrics, state.last_model_name, state.admission.queue.queue_time_s()
    if state.replicated is not None:
        metrics.set_replicas(await state.replicated.reports(), name, state.replicated.num_spread)
    else:
        metrics.set_runtime(await _scheduler_status(state), name, state.num_restarts)
        with contextlib.suppress(PlaitError):
            metrics.unanswered.set(state.client.unanswered_s)
    text = metrics.scrape(state.in_flight, queue_time_s)
    return Response(text, media_type=prometheus.CONTENT_TYPE)


@router.get("/status", **documented(answer=ServerStatus, errors=(401, 500)))
async def status(request: Request) -> Response:
    """The requests and counters of this moment, for the page at "/"."""
    state, tenant = state_of(request), tenant_of(request)
    records = [record for record in state.in_flight.records if record.is_admitted and record.tenant == tenant]
    records.sort(key=lambda record: record.start_time)
    requests = [RunningRequest(r.request_id, r.route, round(r.wall_s, 3), r.num_tokens) for r in records[:MAX_LISTED]]
    reports = [] if state.replicated is None else await state.replicated.reports()
    counts = await _scheduler_status(state) if state.replicated is None else total_status(reports)
    server_status = ServerStatus(
        model=state.last_model_name or None,
        ready=_not_ready_reason(state) is None,
        in_flight=state.in_flight.num_admitted,
        restarts=state.num_restarts,
        requests=requests,
        runtime=_counts(counts),
        replicas=[ReplicaStatus(r.number, r.state, r.restarts, r.load, r.placed, _counts(r.status)) for r in reports],
    )
    return json_response(server_status, headers={"cache-control": "no-store"})


def _counts(status: Status | None) -> Counts | None:
    return None if status is None else msgspec.convert(status, Counts, from_attributes=True)


async def _scheduler_status(state: AppState) -> Status | None:
    try:
        return await state.status_query.status()
    except PlaitError:
        return None


def _not_ready_reason(state: AppState) -> tuple[str, str] | None:
    """The message and error code of why requests are not admitted now; None if they are."""
    if state.admission.is_draining:
        return "the server is shutting down", "draining"
    try:
        client = state.client
    except PlaitError as error:
        return str(error), "runtime_gone"
    if client.is_closed:
        return "the runtime process has ended", "runtime_gone"
    if client.unanswered_s >= NOT_READY_AFTER_S:
        return "the model's runtime does not answer", "runtime_unhealthy"
    return ("the queue is full", "queue_full") if state.admission.is_full else None


def _unavailable(state: AppState, text: str, code: str) -> ApiError:
    headers = {"Retry-After": str(state.settings.retry_after_s)}
    return ApiError(503, text, type=OVERLOADED, code=code, headers=headers)
