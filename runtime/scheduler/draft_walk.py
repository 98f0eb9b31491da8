"""Follows a draft through a request's constraint: which tokens each of its positions allows, and which are forced."""

from __future__ import annotations

import numpy as np

from plait.constrained.trailing_text_matcher import TrailingTextMatcher
from plait.runtime.arrays import IntArray
from plait.runtime.batch.healing import Healing
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.drafts.draft import FORCED, Draft
from plait.runtime.scheduler.token_mask import TokenMaskBuilder, allows_all_tokens, is_allowed


class DraftWalk:
    """Builds the draft of one request. Its matcher moves along with the draft, and back at the end of the `with` block.

    The attributes without comments are those of the request as they will be behind the draft; see `MaskedText`.
    """

    healing: Healing | None = None

    def __init__(self, request: GenerationRequest, token_masks: TokenMaskBuilder) -> None:
        self.params, self.matcher = request.params, request.matcher
        self.forced_queue, self.is_end_optional = list(request.forced_queue), request.is_end_optional
        self.num_output = request.num_output
        self.draft = Draft()
        forced = request.forced_positions
        self.forced_end = forced[-1] + 1 if forced else request.output_start  # see `Proposer.guesses`
        self._text, self._token_masks = request.seq.tokens, token_masks
        self._num_accepted = self._num_drawn = 0
        ends = set(request.params.stop_token_ids)
        if request.matcher is not None or not request.params.ignore_eos:
            ends.update(token_masks.eos_ids)
        self._ends = ends  # tokens that may end the output
        self.mask = self._fill()  # of the position behind the draft; None: any token

    def __enter__(self) -> DraftWalk:
        return self

    def __exit__(self, *error: object) -> None:
        self._text.truncate(len(self._text) - len(self.draft.tokens))
        if self.matcher is not None:
            self.matcher.rollback(self._num_accepted)

    def allows(self, token: int) -> bool:
        """Whether the mask allows the token behind the draft. Tokens that may end the output are not drafted."""
        return token not in self._ends and (self.mask is None or is_allowed(self.mask, token))

    def append(self, token: int, max_tokens: int) -> int:
        """Appends an allowed token, and the tokens that the constraint forces behind it.

        Returns how many. Returns 0, and the draft is complete, if they are more than `max_tokens`, or if the output
        ends with them: the position before them chooses the same token, so that no step is saved.
        """
        forced: list[int] = []
        if self.matcher is not None:
            if not self._accept(token):
                return 0
            forced = self._accept_forced()
            if 1 + len(forced) > max_tokens or self._token_masks.allows_only_eos(self.matcher):
                return 0
        self._add(token, self.mask, is_sampled=True)
        for other in forced:
            self._add(other, self._token_masks.only(other), is_sampled=False)
        if forced:
            self.forced_end = len(self._text)
        self.mask = self._fill()
        return 1 + len(forced)

    def finish(self) -> Draft:
        """Returns the draft with what the position behind it needs."""
        self._add_position(self.mask, is_sampled=True)
        return self.draft

    def _accept(self, token: int) -> bool:
        is_accepted = self.matcher is not None and self.matcher.accept(token)
        self._num_accepted += is_accepted
        return is_accepted

    def _accept_forced(self) -> list[int]:
        """Returns the forced tokens behind a token, accepted. With logprobs they are queued, and drawn one by one."""
        assert self.matcher is not None
        if self.params.logprobs:
            self.forced_queue = self.forced_queue[1:] or self.matcher.forced_tokens()
            return []
        forced = self.matcher.forced_tokens()
        for other in forced:
            if not self._accept(other):
                raise RuntimeError(f"the constraint refused token {other}, which it had forced")
        return forced

    def _add(self, token: int, mask: IntArray | None, is_sampled: bool) -> None:
        self._add_position(mask, is_sampled)
        self.draft.tokens.append(token)
        self._text.append(token)
        self.num_output += 1
        self.is_end_optional = isinstance(self.matcher, TrailingTextMatcher) and self.matcher.may_end

    def _add_position(self, mask: IntArray | None, is_sampled: bool) -> None:
        if mask is not None:
            self.draft.masks[len(self.draft.tokens)] = mask
        self.draft.draws.append(self._num_drawn if is_sampled else FORCED)
        self._num_drawn += is_sampled

    def _fill(self) -> IntArray | None:
        if allows_all_tokens(self):
            return None
        words = np.empty(self._token_masks.num_words, dtype=np.int32)
        self._token_masks.fill(self, words)
        return words
