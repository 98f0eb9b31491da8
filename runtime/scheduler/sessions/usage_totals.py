"""Token totals of all calls since the engine started. They only grow."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import GenerationRequest, Request
from plait.runtime.batch.request_metrics import RequestMetrics
from plait.runtime.scheduler.sessions.session import Call


class UsageTotals(msgspec.Struct):
    """Token totals. Calls that fail or are aborted count as far as they got.

    `prompt_tokens`, and the `cached_tokens` among them, count once a call has its first token; `sampled_tokens` and
    `forced_tokens` count immediately.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0

    def add(self, call: Call) -> None:
        """Adds a call that has ended."""
        if isinstance(call, GenerationRequest):
            self._add_generation(call)
        elif isinstance(call, PoolingRequest):
            self._add_prompt(call.metrics)
        elif call.requests and not call.num_unfinished:
            usage = call.usage()
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens

    def with_running(self, requests: Iterable[Request]) -> UsageTotals:
        """Returns these totals plus the current counts of the generations among `requests`."""
        totals = msgspec.structs.replace(self)
        for request in requests:
            if isinstance(request, GenerationRequest):
                totals._add_generation(request)
        return totals

    def _add_generation(self, request: GenerationRequest) -> None:
        self.sampled_tokens += request.num_sampled
        self.forced_tokens += request.num_forced
        self._add_prompt(request.metrics)

    def _add_prompt(self, metrics: RequestMetrics) -> None:
        if metrics.first_token_time:
            self.prompt_tokens += metrics.num_prompt
            self.cached_tokens += metrics.num_prompt - metrics.computed_tokens
