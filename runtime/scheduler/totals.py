"""What all calls of this scheduler have cost since it began: counts that only grow, for whoever watches it.

Knows: how to read a call's meter. Must not know: what runs when, or who asks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from plait.runtime.scheduler.embedding import Embedding
from plait.runtime.scheduler.rows import Generation, Row
from plait.runtime.scheduler.session import Call


class Totals(msgspec.Struct):
    """`prompt_tokens` and the `cached_tokens` among them count once a call has its first token; `sampled_tokens` and
    `forced_tokens` as they come. Calls that fail or are aborted count as far as they came."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0

    def add(self, call: Call) -> None:
        """Adds a call that is over."""
        if isinstance(call, Generation):
            self._add_generation(call)
        elif isinstance(call, Embedding):
            if call.meter.first_token:
                self.prompt_tokens += call.meter.num_prompt
                self.cached_tokens += call.meter.num_prompt - call.meter.computed
        elif call.rows and not call.num_left:
            usage = call.usage()
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens

    def with_unfinished(self, rows: Iterable[Row]) -> Totals:
        """These and what the generations among `rows` have cost so far."""
        total = msgspec.structs.replace(self)
        for row in rows:
            if isinstance(row, Generation):
                total._add_generation(row)
        return total

    def _add_generation(self, gen: Generation) -> None:
        self.sampled_tokens += gen.num_sampled
        self.forced_tokens += gen.num_forced
        if gen.meter.first_token:
            self.prompt_tokens += gen.meter.num_prompt
            self.cached_tokens += gen.meter.num_prompt - gen.meter.computed
