"""Token counts and times of one request, from which its `Usage` is reported."""

from __future__ import annotations

import time

from plait.runtime.call_reports import CacheMiss, Usage


class RequestMetrics:
    """Counts the tokens of a request by where they came from; `call_reports.Usage` describes each count."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.computed_tokens = self.recomputed = 0
        self.arrival_time = time.monotonic()
        self.admission_time = self.first_token_time = self.compile_s = 0.0
        self.cache_miss: CacheMiss | None = None  # None until the first step is scheduled
        self._high_water = 0  # tokens [0, high_water) were computed or cached for this request before

    def count_cached(self, num_computed: int) -> None:
        """Records that tokens [0, num_computed) are available: from the cache, unless this request computed them."""
        if num_computed > self._high_water:
            self._high_water = num_computed

    def count_computed(self, start: int, end: int) -> None:
        """Records that the model processes tokens [start, end) now."""
        if start >= self._high_water and start >= self.num_prompt:
            self._high_water = end
            return
        fresh_start = min(max(start, self._high_water), end)
        self.recomputed += fresh_start - start
        if fresh_start < self.num_prompt:
            self.computed_tokens += min(end, self.num_prompt) - fresh_start
        if end > self._high_water:
            self._high_water = end

    def computed_before(self, end: int) -> int:
        """Prompt tokens before `end` that the model processed, without the repetition of the last one."""
        return max(0, self.computed_tokens - max(0, self.num_prompt - end))

    def usage(
        self, completion_tokens: int, forced_tokens: int = 0, drafted_tokens: int = 0, reasoning_tokens: int = 0
    ) -> Usage:
        """Returns the usage so far. `completion_tokens` counts sampled and forced ones, with the final one."""
        now = time.monotonic()
        return Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_prompt - self.computed_tokens,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed,
            completion_tokens=completion_tokens,
            forced_tokens=forced_tokens,
            drafted_tokens=drafted_tokens,
            queue_s=(self.admission_time or now) - self.arrival_time,
            ttft_s=(self.first_token_time or now) - self.arrival_time,
            wall_s=now - self.arrival_time,
            compile_s=self.compile_s,
            reasoning_tokens=reasoning_tokens,
        )
