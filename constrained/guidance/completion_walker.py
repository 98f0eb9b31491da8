"""Completions of a text under llguidance: searched on copies of its matcher, and reused while the text grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance
import numpy as np

from plait.constrained.grammar import Int32Array, mask_words
from plait.constrained.vocabulary import Vocabulary

MAX_SKIPPED = 4  # bytes at the start of a known completion that may be dropped; a wrong guess costs little


class LlguidanceWalker:
    """A copy of a matcher after `tokens`, for CompletionSearch. Ends numbers for which `is_at_digit_limit` is true."""

    def __init__(
        self,
        inner: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        tokens: Sequence[int],
        is_at_digit_limit: Callable[[Sequence[int]], bool],
    ) -> None:
        self._inner, self._vocabulary = inner, vocabulary
        self._tokens, self._is_at_digit_limit = list(tokens), is_at_digit_limit

    @property
    def is_complete(self) -> bool:
        return bool(self._inner.is_accepting())

    def forced_tokens(self) -> list[int]:
        return list(self._inner.compute_ff_tokens())

    def is_allowed(self, token: int) -> bool:
        if self._inner.validate_tokens([token]) != 1:
            return False
        return not self._vocabulary.number_limiter.continues_number(token) or self._number_may_continue()

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
        if not self._is_at_digit_limit(self._tokens):
            return True
        mask = self._library_mask()
        before = mask.copy()
        self._vocabulary.number_limiter.forbid_continuation(mask)
        return bool((mask == before).all())

    def _library_mask(self) -> Int32Array:
        """Returns the allowed tokens, before the limit on digits."""
        width = mask_words(len(self._vocabulary))  # the library's mask has one word more if an end token lies beyond
        return np.frombuffer(bytearray(self._inner.compute_bitmask()), np.int32)[:width]

    def _mask(self) -> Int32Array:
        mask = self._library_mask()
        if self._is_at_digit_limit(self._tokens):
            self._vocabulary.number_limiter.forbid_continuation(mask)
        return mask


def remaining_completions(known_completion: list[int], accepted: list[int], vocabulary: Vocabulary) -> list[list[int]]:
    """Returns guesses of what is left of `known_completion` after the tokens `accepted`, the most likely first.

    The first guess drops the longest suffix of the accepted text that the completion begins with; the second drops as
    many bytes as were accepted (a date written in place of another); the others drop 0 to 4 bytes. The caller checks
    each guess.

    >>> remaining_completions([1, 2], [3, 1], Vocabulary((b"", b"a", b"b", b"c"), (0,), lambda text: []))
    [[2], [], [1, 2]]
    """
    if known_completion[: len(accepted)] == accepted:
        return [known_completion[len(accepted) :]]
    spelled = vocabulary.token_bytes
    text, written = (
        b"".join(spelled[token] for token in known_completion),
        b"".join(spelled[token] for token in accepted),
    )
    overlap = next((n for n in range(min(len(text), len(written)), 0, -1) if written.endswith(text[:n])), 0)
    small_sizes = range(min(len(text), MAX_SKIPPED) + 1)
    sizes = dict.fromkeys((overlap, min(len(text), len(written)), *small_sizes))
    return [_drop_leading_bytes(known_completion, size, vocabulary) for size in sizes]


def _drop_leading_bytes(known_completion: list[int], size: int, vocabulary: Vocabulary) -> list[int]:
    """Returns the completion without its first `size` bytes."""
    at = 0
    for index, token in enumerate(known_completion):
        if at == size:
            return known_completion[index:]
        spelled = vocabulary.token_bytes[token]
        at += len(spelled)
        if at > size:
            return [*_encode_fragment(spelled[size - at :], vocabulary), *known_completion[index + 1 :]]
    return []


def _encode_fragment(text: bytes, vocabulary: Vocabulary) -> list[int]:
    """Returns the tokens of a part of a token; [] if it alone is not valid UTF-8."""
    try:
        return list(vocabulary.encode(text.decode()))
    except UnicodeDecodeError:
        return []
