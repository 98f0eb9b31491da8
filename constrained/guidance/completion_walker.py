"""Completions of a text under llguidance: searched on copies of its matcher, and reused while the text grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import llguidance
import numpy as np

from plait.constrained.grammar import Int32Array, mask_words
from plait.constrained.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:
    from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar

MAX_SKIPPED = 4  # bytes at the start of a known completion that a guess may drop


class LlguidanceWalker:
    """A copy of a matcher of a grammar after `tokens`, for CompletionSearch. A number does not exceed its digit limit.

    named_tokens: those that the grammar names as parts of its texts, where it does not name them in marks.
    """

    def __init__(self, grammar: LlguidanceGrammar, inner: llguidance.LLMatcher, tokens: Sequence[int]) -> None:
        self.named_tokens: Sequence[int] = () if grammar.marks else tuple(grammar.control_texts)
        self._grammar, self._vocabulary, self._inner = grammar, grammar.vocabulary, inner
        self._tokens = list(tokens)

    @property
    def is_complete(self) -> bool:
        return bool(self._inner.is_accepting())

    def forced_tokens(self) -> list[int]:
        return list(self._inner.compute_ff_tokens())

    def is_allowed(self, token: int) -> bool:
        if self._inner.validate_tokens([token]) != 1:
            return False
        return not self._vocabulary.number_limiter.continues_number(token) or self._number_may_continue()

    def closing_mark(self, text_token: int | None) -> list[int]:
        """Returns the tokens of a mark that ends the text that stands here; [] if there is none.

        text_token: a token that is allowed within any text; where it still is behind the mark, this did not end it.
        """
        for mark in self._grammar.marks:
            if self._inner.validate_tokens(list(mark)) == len(mark):
                after = self._inner.deep_copy()
                after.consume_tokens(list(mark))
                if text_token is None or after.is_accepting() or after.validate_tokens([text_token]) != 1:
                    return list(mark)
        return []

    def advance(self, tokens: Sequence[int]) -> bool:
        self._tokens += tokens
        return bool(self._inner.consume_tokens(list(tokens)))

    def any_allowed_token(self) -> int | None:
        ends = self._vocabulary.eos_ids
        bits = np.unpackbits(self._mask().view(np.uint8), bitorder="little")
        allowed = (int(token) for token in np.flatnonzero(bits) if int(token) not in ends)
        return next((token for token in allowed if self._vocabulary.token_bytes[token]), None)

    def _number_may_continue(self) -> bool:
        """Returns whether a number at the end of the text may have another digit."""
        if not self._grammar.is_at_digit_limit(self._tokens):
            return True
        mask = self._library_mask()
        before = mask.copy()
        self._vocabulary.number_limiter.forbid_continuation(mask)
        return bool((mask == before).all())

    def _library_mask(self) -> Int32Array:
        """Returns the allowed tokens, before the limit on digits."""
        # llguidance's mask has one more word if an end token does not fit in these.
        width = mask_words(len(self._vocabulary))
        return np.frombuffer(bytearray(self._inner.compute_bitmask()), np.int32)[:width]

    def _mask(self) -> Int32Array:
        mask = self._library_mask()
        if self._grammar.is_at_digit_limit(self._tokens):
            self._vocabulary.number_limiter.forbid_continuation(mask)
        return mask


def remaining_completions(known_completion: list[int], accepted: list[int], vocabulary: Vocabulary) -> list[list[int]]:
    """Returns guesses of what is left of `known_completion` after the tokens `accepted`, the most likely first.

    Each guess drops some bytes at the start of the completion: first its longest prefix that is a suffix of the
    accepted text; then as many bytes as were accepted (one date replaced another); then 0 to 4 bytes. The caller checks
    each guess.

    >>> remaining_completions([1, 2], [3, 1], Vocabulary((b"", b"a", b"b", b"c"), (0,), lambda text: []))
    [[2], [], [1, 2]]
    """
    if known_completion[: len(accepted)] == accepted:
        return [known_completion[len(accepted) :]]
    text, accepted_text = vocabulary.text_of(known_completion), vocabulary.text_of(accepted)
    max_overlap = min(len(text), len(accepted_text))
    overlap = next((n for n in range(max_overlap, 0, -1) if accepted_text.endswith(text[:n])), 0)
    sizes = dict.fromkeys((overlap, max_overlap, *range(min(len(text), MAX_SKIPPED) + 1)))
    return [_drop_leading_bytes(known_completion, size, vocabulary) for size in sizes]


def _drop_leading_bytes(known_completion: list[int], size: int, vocabulary: Vocabulary) -> list[int]:
    """Returns the completion without its first `size` bytes."""
    num_read = 0
    for index, token in enumerate(known_completion):
        if num_read == size:
            return known_completion[index:]
        data = vocabulary.token_bytes[token]
        num_read += len(data)
        if num_read > size:
            return [*vocabulary.spell(data[size - num_read :]), *known_completion[index + 1 :]]
    return []
