"""Runs a request again whose runtime ended before anything of its response was sent.

A request that was in a runtime when it ended is run `MAX_RUNS` times at most, since it may be the cause. A line of a
batch is run again by its batch, alone (`batches/line_runner.py`). What is kept for the next run is what the request
holds anyway, its tokenized prompts and parameters.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Set
from typing import TypeVar

from starlette.requests import Request

from plait.runtime.errors import DeadlineExceeded, PlaitError, RuntimeGone
from plait.runtime.process.runtime import START_TIMEOUT_S
from plait.runtime.server.app_state import AppState, state_of
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import NO_RETRY, OVERLOADED, ApiError
from plait.runtime.server.http.response import cancel_on_disconnect
from plait.runtime.server.in_flight import RequestRecord, current_request

T = TypeVar("T")

MAX_RUNS = 2
MAX_WAIT_S = 30.0  # for a runtime, of a request that was in none
MAX_WAIT_OF_LOST_S = START_TIMEOUT_S  # of one that was: a client's next request would begin to count anew

log = logging.getLogger("plait.server")


async def run_again_if_lost(request: Request, run: Callable[[], Awaitable[T]]) -> T:
    """Returns the value of `run()`, which uses the current client and sends nothing before it returns.

    `use_model` has set the request's model. If its runtime ends meanwhile, waits for the next one, as long as a start
    may take (if there was none, 30 s) and up to the request's own timeout, and calls `run` again. Raises what the last
    run raised, and DeadlineExceeded.
    """
    state, record, num_lost_runs = state_of(request), current_request(), 0
    assert record is not None and record.model is not None
    model = record.model
    while True:
        had_runtime = not model.client.is_closed
        try:
            return await run()
        except (PlaitError, ApiError) as error:
            if not _is_runtime_gone(error):
                raise
            is_lost = had_runtime or bool(record.awaited_calls)
            num_lost_runs += is_lost
            if num_lost_runs == MAX_RUNS:
                # It was in several runtimes when they ended, and is perhaps why they did.
                text = f"has ended {MAX_RUNS} times while it ran this request, which is not run again"
                raise _runtime_gone(text) from error
            if record.is_background and record.awaited_calls and not _was_moved(record):
                raise
            record.begin_next_run()
            limit_s = MAX_WAIT_OF_LOST_S if num_lost_runs else MAX_WAIT_S
            if record.is_background:
                limit_s = math.inf  # nobody waits for a line
            timeout_s = min(limit_s, record.deadline - time.monotonic())
            if not await cancel_on_disconnect(request, model.wait_for_replacement(timeout_s)):
                if timeout_s < limit_s and model.replaces_runtime:
                    raise DeadlineExceeded("the request's timeout passed while the runtime was restarted") from error
                _ = model.client  # raises NotRestarted, which says why there is no further runtime
                if limit_s == MAX_WAIT_OF_LOST_S and model.replaces_runtime:
                    raise _runtime_gone(f"has ended, and there was none for {limit_s:g} s") from error
                raise
            if is_lost:
                state.metrics.reruns.add(1)
                log.warning("%s is run again: %s", record.request_id, error)


def _runtime_gone(what: str) -> ApiError:
    """The answer to a request that is not run again, which its client should not repeat either."""
    text = f"the model's runtime process {what}"
    return ApiError(503, text, type=OVERLOADED, code=RuntimeGone.kind, headers=NO_RETRY)


class _ReplicaSilent(RuntimeGone):
    """A replica does not answer, and its calls are run elsewhere."""


def run_elsewhere(state: AppState, model: ServedModel, calls: Set[int]) -> None:
    """Fails those of `calls` of a model whose requests have sent nothing, so that these are run again.

    For the calls on a replica that does not answer. A request that is in its last run stays there.
    """
    error = _ReplicaSilent("the replica of this request does not answer")
    for record in tuple(state.in_flight.records):
        if record.model is model and record.first_byte_time is None and record.num_runs < MAX_RUNS:
            for call in record.awaited_calls:
                if call.call_id in calls and not call.done():
                    call.abort()
                    call.on_failed(error)


def _was_moved(record: RequestRecord) -> bool:
    return any(isinstance(call.failure, _ReplicaSilent) for call in record.awaited_calls)


def _is_runtime_gone(error: Exception) -> bool:
    return isinstance(error, RuntimeGone) or (isinstance(error, ApiError) and error.code == RuntimeGone.kind)
