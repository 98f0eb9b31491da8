"""Prompt lookup: guesses the token that followed the text's last tokens where they occurred before in it.

    ... the answer is forty two . [...] so the answer is | forty two .
                                           -------------   guesses

Long matches are right more often than short ones, and copied text more often than prose. So the level of a guess is the
length of the match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from plait.runtime.arrays import IntArray
from plait.runtime.drafts.proposer import Guess

LOOKBACK_TOKENS = 1 << 14  # how far back a match is searched
MAX_MISALIGNED_MATCHES = 64  # byte matches inside a token after which a search is given up

# Assumed rates after a match of 1, 2, ... tokens or more. These are the rates measured on prose (0.19, 0.41, 0.60,
# 0.69, 0.72, 0.90), lowered for short matches, whose trials cost most.
PRIOR_RATES = (0.15, 0.35, 0.6, 0.7, 0.8, 0.9)
MAX_NGRAM = len(PRIOR_RATES)  # tokens compared


def find_ngram_match(tokens: IntArray) -> tuple[int, int]:
    """Finds the longest suffix of tokens [m] int32, up to MAX_NGRAM, that also occurs earlier.

    Returns (i, n): the last n tokens also occur directly before index i, at the latest such index; (0, 0) without any.

    >>> import numpy as np
    >>> find_ngram_match(np.array([5, 1, 2, 3, 8, 9, 2, 3, 4, 1, 2, 3], dtype=np.int32))
    (4, 3)
    """
    first = max(0, len(tokens) - LOOKBACK_TOKENS)
    data = tokens[first:].tobytes()  # searching bytes is faster than NumPy for a single lookup
    end, length = len(data) - 4, 0
    for next_length in range(1, min(MAX_NGRAM, end // 4) + 1):
        offset = _rfind_aligned(data, data[-4 * next_length :], end)
        if offset < 0:
            break
        end, length = offset + 4 * next_length, next_length
    return (first + end // 4, length) if length else (0, 0)


def _rfind_aligned(data: bytes, ngram: bytes, end: int) -> int:
    """The last offset of `ngram` in data[:end] that is a multiple of four; -1 if there is none or the search is given
    up.
    """
    for _ in range(MAX_MISALIGNED_MATCHES):
        offset = data.rfind(ngram, 0, end)
        if offset < 0 or not offset % 4:
            return offset
        end = offset + len(ngram) - 1
    return -1


class PromptLookup:
    """A `Proposer` that looks in the text itself."""

    prior: ClassVar[tuple[float, ...]] = PRIOR_RATES

    def __init__(self) -> None:
        self._distance = 0  # from the guessed token back to the one that it repeats; 0: no match yet

    def guesses(self, text: IntArray, forced_end: int) -> list[Guess]:
        """See `Proposer`. A match of MAX_NGRAM tokens is followed as long as it lasts, without another search."""
        end, length = len(text) - self._distance, MAX_NGRAM
        is_followed = self._distance and end >= MAX_NGRAM
        if not is_followed or text[-MAX_NGRAM:].tobytes() != text[end - MAX_NGRAM : end].tobytes():
            end, length = find_ngram_match(text)
            if not length:
                return []
            self._distance = len(text) - end
        return [Guess(int(text[end]), length - 1)]

    def accept(self, text: IntArray, forced: Sequence[int]) -> None:
        """See `Proposer`. The text is all that it needs, and `guesses` gets it."""
