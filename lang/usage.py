"""`ProgramUsage`: token counts and times, summed over the calls of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.lang.core.results import CallSegment

_PROMPT_TOKENS = ("prompt_tokens", "cached_tokens", "computed_tokens", "recomputed_tokens")
_SUMMED = (*_PROMPT_TOKENS, "completion_tokens", "forced_tokens", "queue_s")


@dataclass(frozen=True)
class ProgramUsage:
    """Tokens and seconds of all finished calls of a program, forks included.

    - `prompt_tokens` = `cached_tokens` (found in the prefix cache) + `computed_tokens` (computed by the model).
      `recomputed_tokens` were computed again because the KV cache was full.
    - `completion_tokens` = `sampled_tokens` + `forced_tokens` (a constraint allowed only one token).
    - `queue_s`: the sum of the seconds that calls waited for admission. `wall_s`: the seconds from the start of the
      first call to the end of the last one.
    - `failed_calls`, including aborted ones such as the losers of a race, are not part of the other numbers, except
      `lost_tokens`: the tokens that they generated.
    - `by_variable`: the same numbers for each variable, over all branches and samples.

    `print(state.usage)` is two lines.

    >>> state.usage.cached_tokens / state.usage.prompt_tokens       # doctest: +SKIP
    >>> state.usage.by_variable["answer"].sampled_tokens            # doctest: +SKIP
    """

    calls: int = 0
    failed_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    lost_tokens: int = 0
    queue_s: float = 0.0
    wall_s: float = 0.0
    by_variable: Mapping[str, ProgramUsage] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Two lines: the prompt tokens, and the generated ones. What seldom happens is only there if it did."""
        prompt = f"{self.prompt_tokens:,} prompt tokens: "
        prompt += f"{self.computed_tokens:,} computed, {self.cached_tokens:,} cached"
        prompt += f", {self.recomputed_tokens:,} computed again" * (self.recomputed_tokens > 0)
        answer = f"{self.completion_tokens:,} generated: {self.sampled_tokens:,} sampled, {self.forced_tokens:,} forced"
        answer += f"; {self.calls} call{'s' * (self.calls != 1)} in {self.wall_s:.2f} s"
        answer += f", {self.queue_s:.2f} s queued" * (self.queue_s >= 0.005)
        answer += f"; {self.failed_calls} failed, {self.lost_tokens:,} tokens lost" * (self.failed_calls > 0)
        return f"{prompt}\n{answer}"

    def _repr_html_(self) -> str:
        """Returns the numbers as a table for notebooks."""
        from plait.lang.html.render import fragment  # lazy: few programs need it

        return fragment("usage", self)


def total(call_segments: Iterable[CallSegment]) -> ProgramUsage:
    """Waits for the calls and returns the sum of their usage."""
    call_segments = list(call_segments)
    names: dict[str, list[CallSegment]] = {}
    for call_segment in call_segments:
        if call_segment.name is not None:
            names.setdefault(call_segment.name, []).append(call_segment)
    return _sum(call_segments, {name: _sum(own, {}) for name, own in names.items()})


def _sum(call_segments: list[CallSegment], by_variable: Mapping[str, ProgramUsage]) -> ProgramUsage:
    finished = [call_segment for call_segment in call_segments if call_segment.failure() is None]
    usages = [call_segment.call.result().usage for call_segment in finished]
    sums: dict[str, Any] = {name: sum(getattr(usage, name) for usage in usages) for name in _SUMMED}
    return ProgramUsage(
        **sums,
        calls=len(usages),
        failed_calls=len(call_segments) - len(usages),
        sampled_tokens=sums["completion_tokens"] - sums["forced_tokens"],
        lost_tokens=sum(
            call_segment.call.num_tokens for call_segment in call_segments if call_segment.failure() is not None
        ),
        wall_s=max((call.ended_s for call in finished), default=0.0)
        - min((call.began_s for call in finished), default=0.0),
        by_variable=by_variable,
    )
