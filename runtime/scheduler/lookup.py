"""Guesses what comes next by looking up where the text's last tokens stood before (prompt lookup decoding).

    ... the answer is forty two . [...] so the answer is | forty two .
                                        ------------        guessed

The guesses go through the model together with the token before them; those that it would have chosen itself are kept,
so the tokens are the same and only come in fewer steps. Blockwise verification: Stern et al. 2018, arXiv 1811.03115.

Knows: token ids. Must not know: models, sampling, pages.
"""

from __future__ import annotations

import numpy as np

from plait.runtime.scheduler.page_pool import IntArray

NGRAM = 3  # tokens that have to recur
WINDOW = 1 << 14  # how far back is looked
FIRST, MOST = 3, 16  # tokens guessed at first, and at most
LONGEST_PAUSE = 64


def find_continuation(tokens: IntArray, most: int) -> list[int]:
    """At most `most` tokens that followed the latest earlier place of the last NGRAM of tokens [n]; [] without one.

    >>> find_continuation(np.array([5, 1, 2, 3, 8, 9, 1, 2, 3]), 2)
    [8, 9]
    """
    if len(tokens) <= NGRAM or most <= 0:
        return []
    tokens = tokens[-WINDOW:]
    end = len(tokens) - NGRAM  # where the last NGRAM tokens begin
    places = np.flatnonzero(tokens[:end] == tokens[end])
    for offset in range(1, NGRAM):
        places = places[tokens[places + offset] == tokens[end + offset]]
    if not len(places):
        return []
    after = int(places[-1]) + NGRAM
    found: list[int] = tokens[after : after + most].tolist()
    return found


class PromptLookup:
    """The guesses for one text: more of them while they are right, and pauses that grow while they are wrong."""

    def __init__(self) -> None:
        self._size = FIRST
        self._pause = self._next_pause = 0

    def guess(self, tokens: IntArray, most: int) -> list[int]:
        """Tokens that may follow tokens [n]; none while it pauses."""
        if self._pause:
            self._pause -= 1
            return []
        return find_continuation(tokens, min(most, self._size))

    def learn(self, num_guessed: int, num_right: int) -> None:
        """How the last guesses turned out."""
        if num_right == num_guessed:
            self._size = min(2 * self._size, MOST)
        if 2 * num_right >= num_guessed:
            self._next_pause = 0
            return
        self._size = max(1, self._size // 2)
        self._next_pause = min(max(1, 2 * self._next_pause), LONGEST_PAUSE)
        self._pause = self._next_pause
