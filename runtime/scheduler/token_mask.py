"""Builds the packed token masks of one step from constraints, forced tokens and `min_tokens`.

Bit i % 32 of word i // 32 is set if token i is allowed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plait.constrained import Matcher, Vocabulary
from plait.constrained.token_healing import TokenHealer
from plait.runtime.arrays import IntArray
from plait.runtime.batch.healing import Healing
from plait.runtime.batch.request import GenerationRequest, Request
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling_params import SamplingParams

MAX_CONSTRAINT_CPU_S = 0.1  # CPU time that one request's constraint may take for one token
MAX_PARTIAL_HEAD_TOKENS = (
    1024  # masks with at most this many tokens: only their columns of the output head are computed
)


class MaskedText(Protocol):
    """What a mask depends on: a GenerationRequest, or one whose draft is being built."""

    params: SamplingParams
    matcher: Matcher | None
    healing: Healing | None
    forced_queue: list[int]
    is_end_optional: bool

    @property
    def num_output(self) -> int: ...


class TokenMaskBuilder:
    """Fills masks for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.num_words = (len(vocabulary) + 31) // 32
        self.eos_ids = vocabulary.eos_ids
        self.healer = TokenHealer(vocabulary)
        self._scratch: IntArray = np.zeros(self.num_words, dtype=np.int32)
        self._not_eos: IntArray = np.full(self.num_words, -1, dtype=np.int32)
        _clear_bits(self._not_eos, vocabulary.eos_ids)

    def build(
        self,
        sampled_requests: Sequence[tuple[int, GenerationRequest]],
        drafted: Sequence[tuple[int, GenerationRequest]],
        discarded: Collection[Request],
        partial_head: bool,
        on_error: Callable[[GenerationRequest, Exception], None],
    ) -> TokenMask | None:
        """Returns the masks of the requests that may not sample every token, or None if there are none.

        `sampled_requests`: (index of the logits, request). `drafted`: see `Batch`; their masks exist already.
        `discarded`: requests to skip. `partial_head`: whether the runner may compute only the allowed logits.
        `on_error` is called for a request whose constraint fails.
        """
        rows, masks, allowed_ids = [], [], dict[int, npt.NDArray[np.int64]]()

        def add_allowed_ids(logits_index: int, request: GenerationRequest, words: IntArray) -> None:
            if partial_head and not request.params.logprobs:
                token_ids = _set_bits(words, MAX_PARTIAL_HEAD_TOKENS)
                if token_ids is not None:
                    allowed_ids[logits_index] = token_ids

        for row, (logits_index, request) in enumerate(sampled_requests):
            if request.matcher is None and not request.params.min_tokens and request.healing is None:
                continue  # nearly all requests
            if allows_all_tokens(request) or request in discarded:
                continue
            words = np.empty(self.num_words, dtype=np.int32)
            try:
                with ConstraintCpuLimit():
                    self.fill(request, words)
            except Exception as error:
                on_error(request, error)
                continue
            rows.append(row)
            masks.append(words)
            add_allowed_ids(logits_index, request, words)
        has_drafts = False
        for first, request in drafted:
            for position, words in request.draft.masks.items() if request.draft is not None else ():
                has_drafts = True
                add_allowed_ids(first + position, request, words)
        if not rows and not has_drafts:
            return None
        return TokenMask(rows, np.stack(masks) if rows else np.empty((0, self.num_words), np.int32), allowed_ids)

    def fill(self, request: MaskedText, words: IntArray) -> None:
        """Writes the mask [num_words] of the tokens that the text may go on with."""
        if request.forced_queue:
            words.fill(0)
            _set_bit(words, request.forced_queue[0])
            return
        if request.healing is not None:
            self.healer.fill_mask(request.healing.remaining, request.matcher, words)
            return
        if request.matcher is None:
            words.fill(-1)
        else:
            request.matcher.fill_mask(words)
        if request.num_output < request.params.min_tokens:
            before = words.copy()
            _clear_bits(words, (*self.eos_ids, *request.params.stop_token_ids))
            if not words.any():
                words[:] = before  # the constraint is complete: it ends the output before min_tokens

    def only(self, token: int) -> IntArray:
        """Returns the mask [num_words] of one token."""
        words: IntArray = np.zeros(self.num_words, dtype=np.int32)
        _set_bit(words, token)
        return words

    def allows_only_eos(self, matcher: Matcher) -> bool:
        """Whether the constraint allows nothing but the end of the output, so that no token need be sampled."""
        if not matcher.is_accepting:
            return False
        matcher.fill_mask(self._scratch)
        return not (self._scratch & self._not_eos).any()


def allows_all_tokens(request: MaskedText) -> bool:
    """Whether the text may go on with any token, so that it needs no mask."""
    if request.forced_queue or request.healing is not None:
        return False
    return request.is_end_optional or (request.matcher is None and request.num_output >= request.params.min_tokens)


class ConstraintCpuLimit:
    """Raises RuntimeError after a block in which a constraint delayed the other requests, unless `has_ended` is set.

    Measures CPU time of this thread, without garbage collections: they depend on the objects of all requests.
    """

    has_ended = False  # no token of the request waits for its constraint

    def __enter__(self) -> ConstraintCpuLimit:
        self._was_enabled = gc.isenabled()
        gc.disable()
        self._start_s = time.thread_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        spent_s = time.thread_time() - self._start_s
        if self._was_enabled:
            gc.enable()
        if kind is None and not self.has_ended and spent_s > MAX_CONSTRAINT_CPU_S:
            limit_ms = MAX_CONSTRAINT_CPU_S * 1e3
            raise RuntimeError(f"one token of this constraint took {spent_s * 1e3:.0f} ms; {limit_ms:.0f} are allowed")


def _clear_bits(words: IntArray, token_ids: Sequence[int]) -> None:
    unsigned = words.view(np.uint32)
    for token in token_ids:
        unsigned[token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)


def is_allowed(words: IntArray, token: int) -> bool:
    """Whether a mask [num_words] allows the token."""
    return bool(words.view(np.uint32)[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _set_bit(words: IntArray, token: int) -> None:
    words.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))


def _set_bits(words: IntArray, max_count: int) -> npt.NDArray[np.int64] | None:
    """The indices of the set bits of a mask, or None if there are more than `max_count`, or none."""
    if np.count_nonzero(words) > max_count:
        return None
    token_ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return token_ids if 0 < len(token_ids) <= max_count else None
