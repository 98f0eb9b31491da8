"""How many draft tokens a step has, where they are expected to save time (speculative decoding by prompt lookup)."""

from __future__ import annotations

import math

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request

MAX_DRAFTING_TOKENS = 32  # sum of running requests and draft tokens in a step with drafts

# The cost of a draft token relative to a decode token, multiplied by sqrt(batch size): the larger the batch, the less
# another row gains from sharing the read of the weights. Measured: 0.1 with 1 request, 0.5 with 16.
DRAFT_TOKEN_COST = 0.12
MAX_DRAFT_TOKEN_COST = 0.5  # no drafts at this cost or above


def may_draft(num_running: int) -> bool:
    """Whether any draft may save time beside so many running requests."""
    return _token_cost(num_running) < MAX_DRAFT_TOKEN_COST


def _token_cost(num_running: int) -> float:
    return DRAFT_TOKEN_COST * math.sqrt(num_running)


def add_draft(batch: Batch, request: Request, num_running: int, max_length: int) -> None:
    """Appends draft tokens to the request: as many as fit the step and are expected to save time."""
    token_cost = _token_cost(num_running)
    num_free = MAX_DRAFTING_TOKENS - num_running - batch.num_draft_tokens
    num_unscheduled = num_running - len(batch.rows)
    max_draft = min(
        -(-num_free // max(1, num_unscheduled)),
        batch.tokens_within_budget(request, request.seq.num_computed) - 1,
        max_length - len(request.seq),
    )
    if max_draft > 0:
        # The first draft token of a step costs as much as two or three further ones.
        first_token_cost = 0.0 if batch.num_draft_tokens else token_cost * (2 - 1 / num_running)
        # With this cooldown about two requests search for a match in each step.
        request.draft(max_draft, token_cost, first_token_cost, cooldown_steps=num_running // 2)
