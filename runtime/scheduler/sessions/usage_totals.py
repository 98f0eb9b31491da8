"""What all calls of this scheduler have cost since it began: counts that only grow, for whoever watches it.

Knows: how to read a call's meter. Must not know: what runs when, or who asks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import GenerationRequest, Request
from plait.runtime.scheduler.sessions.session import Call


class UsageTotals(msgspec.Struct):
    """`prompt_tokens` and the `cached_tokens` among them count once a call has its first token; `sampled_tokens` and
    `forced_tokens` as they come. Calls that fail or are aborted count as far as they came."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0

    def add(self, call: Call) -> None:
        """Adds a call that is over."""
        if isinstance(call, GenerationRequest):
            self._add_generation(call)
        elif isinstance(call, PoolingRequest):
            if call.metrics.first_token_time:
                self.prompt_tokens += call.metrics.num_prompt
                self.cached_tokens += call.metrics.num_prompt - call.metrics.computed_tokens
        elif call.requests and not call.num_unfinished:
            usage = call.usage()
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens

    def with_running(self, requests: Iterable[Request]) -> UsageTotals:
        """These and what the generations among `requests` have cost so far."""
        total = msgspec.structs.replace(self)
        for request in requests:
            if isinstance(request, GenerationRequest):
                total._add_generation(request)
        return total

    def _add_generation(self, gen: GenerationRequest) -> None:
        self.sampled_tokens += gen.num_sampled
        self.forced_tokens += gen.num_forced
        if gen.metrics.first_token_time:
            self.prompt_tokens += gen.metrics.num_prompt
            self.cached_tokens += gen.metrics.num_prompt - gen.metrics.computed_tokens
