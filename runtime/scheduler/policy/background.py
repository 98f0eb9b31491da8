"""What background requests may use while others run or wait: a part of the rows, and of the tokens of a step.

They are ranked behind all others, and give up their rows and pages to them (`fairness.py`, `batching.py`). Without
other requests they are scheduled like any.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.runtime.batch.request import Request
from plait.runtime.scheduler.policy.fairness import Fairness

ROWS_PART = 4  # one row in so many beside other requests, but at least one
TOKENS_PART = 8  # one prompt token of a step in so many beside other requests


class BackgroundLimits:
    """Limits the background requests among those that `fairness` counts."""

    def __init__(self, fairness: Fairness, max_batch_tokens: int, max_batch_rows: int) -> None:
        self._fairness = fairness
        self._max_rows = max(1, max_batch_rows // ROWS_PART)
        self._max_tokens = max(1, max_batch_tokens // TOKENS_PART)
        self._tokens_left = self._max_tokens

    @property
    def is_limited(self) -> bool:
        """Whether there are requests of both kinds."""
        return self._fairness.is_mixed

    def begin_step(self) -> None:
        """Renews the prompt tokens of a step."""
        self._tokens_left = self._max_tokens

    def to_pause(self, running: Iterable[Request]) -> list[Request]:
        """Returns the background requests that exceed their rows, those that were admitted last."""
        if not self.is_limited:
            return []
        return [request for request in running if request.owner.is_background][self._max_rows :]

    def may_admit(self, request: Request, running: Iterable[Request], num_paused: int = 0) -> bool:
        """Whether a waiting request may become a running one, when `num_paused` others of its kind are paused."""
        if not self.is_limited or not request.owner.is_background:
            return True
        return sum(other.owner.is_background for other in running) - num_paused < self._max_rows

    def within_budget(self, request: Request, count: int) -> int:
        """Returns how many of `count` tokens the request may have in this step. One token is always allowed."""
        if count <= 1 or not self.is_limited or not request.owner.is_background or request.num_draft_tokens:
            return count
        count = min(count, self._tokens_left)
        self._tokens_left -= count
        return count
