"""The batch of one step: which tokens of which requests the model computes, and what is read from the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from plait.runtime.arrays import IntArray
from plait.runtime.batch.request import GenerationRequest, Request

NO_LIMIT = 1 << 30
MAX_LOGITS = 512  # positions of one step with logits: [MAX_LOGITS, V] float32 is 100 MB for 49,152 tokens


class PlaceholderToken(NamedTuple):
    """Stands for a token that the in-flight step has yet to sample.

    `slot`: index of the token among those that the step samples. `page`: the page reserved for it.
    """

    slot: int
    page: int


# Not frozen: every step makes one for each request, and frozen ones take twice as long.
@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Tokens [start, start + count) of `request`, to be computed in this step.

    The step returns the logits of the last `num_logits` of them, or the hidden states of the last `num_states`.
    `is_sampled`: the request's last token is among them, so that the step samples the next one.
    """

    request: Request
    start: int
    count: int
    num_logits: int
    num_draft_tokens: int = 0  # how many of the tokens are guesses, to be verified with the logits before each
    is_sampled: bool = True
    placeholder: PlaceholderToken | None = None
    num_states: int = 0

    @property
    def is_still_next(self) -> bool:
        """Whether the token that this step samples directly follows the request's current tokens."""
        return self.start + self.count == self.request.seq.tokens.size

    def token_ids(self) -> IntArray:
        """[count] int32. The value -1 - slot is the placeholder of a token that the previous step samples."""
        if self.placeholder is not None:
            return np.array([-1 - self.placeholder.slot], dtype=np.int32)
        return self.request.seq.tokens.view()[self.start : self.start + self.count]

    def single_token_id(self) -> int:
        """`token_ids()[0]`, for a request with one token in this step."""
        return self.request.seq.tokens.at(self.start) if self.placeholder is None else -1 - self.placeholder.slot

    def pages(self) -> IntArray:
        """[start + count] int32, the pages of all tokens up to the last one of this step."""
        pages = self.request.seq.pages.view()[: self.start + self.count]
        return pages if self.placeholder is None else np.append(pages[: self.start], np.int32(self.placeholder.page))


class Batch:
    """The requests of one step. They form a ragged tensor: each row has count >= 1 tokens.

    `token_budget`, `logits_budget` and `prefix_budget` (logits of requests that need probabilities) are what is left of
    the limits given to the constructor.
    """

    def __init__(self, max_tokens: int, max_logits: int = NO_LIMIT, max_prefix_logits: int = NO_LIMIT) -> None:
        self.token_budget = max_tokens
        self.logits_budget = max_logits
        self.prefix_budget = max_prefix_logits
        self.set_rows([])

    def set_rows(self, rows: list[ScheduledRequest]) -> None:
        """Replaces all rows. The budgets do not change."""
        self.rows: list[ScheduledRequest] = []
        self.num_tokens = self.num_logits = self.num_states = self.num_draft_tokens = 0
        self.needs_only_argmax = True  # whether the argmax of each row of logits is enough
        self.drafted: list[tuple[int, GenerationRequest]] = []  # (first index of the logits, request with a draft)
        self.sampled_requests: list[
            tuple[int, GenerationRequest]
        ] = []  # (index of the logits, request), one token each
        for scheduled in rows:
            self._append(scheduled)

    def _append(self, scheduled: ScheduledRequest) -> None:
        request, num_logits = scheduled.request, scheduled.num_logits
        self.rows.append(scheduled)
        self.num_tokens += scheduled.count
        self.num_logits += num_logits
        self.num_draft_tokens += scheduled.num_draft_tokens
        self.num_states += scheduled.num_states
        if not isinstance(request, GenerationRequest):
            self.needs_only_argmax &= request.wants_states
        elif request.draft is not None:
            self.needs_only_argmax &= request.needs_only_argmax and not request.draft.masks
            self.drafted.append((self.num_logits - num_logits, request))
        else:
            if not request.needs_only_argmax or num_logits != scheduled.is_sampled:
                self.needs_only_argmax = False
            if scheduled.is_sampled:
                self.sampled_requests.append((self.num_logits - 1, request))

    def add(self, request: Request, start: int, count: int) -> None:
        """Adds tokens [start, start + count) of the request."""
        end = start + count
        num_wanted = max(0, end - max(start, request.logits_from))
        num_logits, num_states = (0, num_wanted) if request.wants_states else (num_wanted, 0)
        is_sampled = end == request.seq.tokens.size
        self._append(
            ScheduledRequest(
                request, start, count, num_logits, request.num_draft_tokens, is_sampled, num_states=num_states
            )
        )
        self.token_budget -= count
        self.logits_budget -= num_logits
        if request.needs_probabilities:
            self.prefix_budget -= num_logits

    def add_decode(self, request: Request, start: int) -> None:
        """`add` for a request whose only pending token, at `start`, is not a guess."""
        self._append(ScheduledRequest(request, start, 1, 1))
        self.token_budget -= 1
        self.logits_budget -= 1

    def add_placeholder(self, request: Request, page: int) -> None:
        """Adds the token that the in-flight step samples for the request; `page` is reserved for it."""
        placeholder = PlaceholderToken(request.in_flight_slot, page)
        self._append(ScheduledRequest(request, len(request.seq), 1, 1, placeholder=placeholder))
        self.token_budget -= 1
        self.logits_budget -= 1

    def tokens_within_budget(self, request: Request, start: int) -> int:
        """How many of the request's tokens from `start` on the two budgets allow."""
        if request.wants_states:
            return self.token_budget
        num_logits = min(self.logits_budget, self.prefix_budget) if request.needs_probabilities else self.logits_budget
        return min(self.token_budget, max(0, request.logits_from - start) + num_logits)

    def token_ids(self) -> IntArray:
        """[num_tokens] int32, the tokens of all rows concatenated; see `ScheduledRequest.token_ids`."""
        if self.num_tokens == len(self.rows):  # nearly every step: avoids one array for each row
            return np.array([scheduled.single_token_id() for scheduled in self.rows], dtype=np.int32)
        return np.concatenate([scheduled.token_ids() for scheduled in self.rows])
