"""What operators, load balancers and the page ask: /health, /ready, /metrics, /status.

Knows: the state of this server. Must not know: what requests are about.
"""

from __future__ import annotations

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

router = APIRouter()

MAX_LISTED = 50


class Health(msgspec.Struct):
    """The server and the runtime behind it live."""

    status: str = "ok"


class Ready(msgspec.Struct):
    """The server admits requests."""

    ready: bool = True


class RunningRequest(msgspec.Struct):
    """A request that is being answered; `tokens` of its answers are there."""

    id: str
    route: str
    seconds: float
    tokens: int


class Counts(msgspec.Struct):
    """The scheduler's; see `messages.Status`. Token counts only grow while the runtime lives."""

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


class ServerStatus(msgspec.Struct):
    """`requests`: those of the asking key, the oldest first, at most 50. `runtime` is null while it does not answer."""

    model: str | None
    ready: bool
    in_flight: int
    restarts: int
    requests: list[RunningRequest]
    runtime: Counts | None


@router.get("/health", **documented(answer=Health, errors=(500, 503)))
async def health(request: Request) -> Response:
    """Whether the scheduler's loop beats. Generates nothing."""
    if not await state_of(request).liveness.is_alive():
        raise _unavailable(state_of(request), "the model's runtime does not answer", "runtime_unhealthy")
    return json_response(Health())


@router.get("/ready", **documented(answer=Ready, errors=(500, 503)))
async def ready(request: Request) -> Response:
    """Whether a request would be admitted now."""
    state = state_of(request)
    if why := _why_not_ready(state):
        raise _unavailable(state, *why)
    return json_response(Ready())


@router.get("/metrics", **documented(answer=str, errors=(401, 500), media_type=prometheus.CONTENT_TYPE))
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    state = state_of(request)
    status = await _scheduler(state)
    text = state.metrics.scrape(state.in_flight, status, state.last_model_name, state.num_restarts)
    return Response(text, media_type=prometheus.CONTENT_TYPE)


@router.get("/status", **documented(answer=ServerStatus, errors=(401, 500)))
async def status(request: Request) -> Response:
    """What runs now, for the page at "/"."""
    state, tenant = state_of(request), tenant_of(request)
    mine = [each for each in state.in_flight.records if each.is_admitted and each.tenant == tenant]
    mine.sort(key=lambda each: each.start_time)
    listed = [RunningRequest(r.request_id, r.route, round(r.wall_s, 3), r.num_tokens) for r in mine[:MAX_LISTED]]
    counts = await _scheduler(state)
    answer = ServerStatus(
        model=state.last_model_name or None,
        ready=_why_not_ready(state) is None,
        in_flight=state.in_flight.num_admitted,
        restarts=state.num_restarts,
        requests=listed,
        runtime=None if counts is None else msgspec.convert(counts, Counts, from_attributes=True),
    )
    return json_response(answer, headers={"cache-control": "no-store"})


async def _scheduler(state: AppState) -> Status | None:
    try:
        return await state.liveness.query_status()
    except PlaitError:
        return None


def _why_not_ready(state: AppState) -> tuple[str, str] | None:
    if state.admission.is_draining:
        return "the server is being stopped", "draining"
    try:
        state.client  # noqa: B018 - it raises while there is none
    except PlaitError as error:
        return str(error), "runtime_gone"
    return ("the queue is full", "queue_full") if state.admission.is_full else None


def _unavailable(state: AppState, text: str, code: str) -> ApiError:
    headers = {"Retry-After": str(state.settings.retry_after_s)}
    return ApiError(503, text, type=OVERLOADED, code=code, headers=headers)
