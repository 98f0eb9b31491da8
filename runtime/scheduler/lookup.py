"""Guesses what comes next by looking up where the text's last tokens stood before (prompt lookup decoding).

    ... the answer is forty two . [...] so the answer is | forty two .
                                           -------------   guessed

The guesses go through the model together with the token before them; those that it would have chosen itself are kept,
so the tokens are the same and only come in fewer steps. Blockwise verification: Stern et al. 2018, arXiv 1811.03115.

A long match is more often right than a short one, and a text that copies more often than one that tells a story. So
each text counts how its guesses turned out by the length of their match, and guesses on while all of them are likely
enough to be right to pay for their rows of the step. What does not pay by what is expected of it is never tried.

Knows: token ids. Must not know: models, sampling, pages.
"""

from __future__ import annotations

import numpy as np

from plait.runtime.scheduler.page_pool import IntArray

WINDOW = 1 << 14  # how far back is looked
MISSES = 64  # places that are none, at most, before a search is given up
MOST = 24  # tokens guessed at once

# Right guesses behind a match of 1, 2, ... tokens and of more, before any count, as in prose, where they are 0.19,
# 0.41, 0.60, 0.69, 0.72 and 0.90, but for the short ones, whose tries cost most.
EXPECTED = (0.15, 0.35, 0.6, 0.7, 0.8, 0.9)
EXPECTED_WEIGHT = 4.0  # in guesses
REMEMBERED = 0.9  # of the counts, at each guess
RENEWED = 0.01  # of the way back to what is expected, each time that a guess is not worth trying

LONGEST = len(EXPECTED)  # tokens compared


def find_place(tokens: IntArray) -> tuple[int, int]:
    """(i, n): the last n of tokens [m] int32, at most LONGEST, also stand right before place i, which is the latest of
    the places with the most; n = 0 without any.

    >>> find_place(np.array([5, 1, 2, 3, 8, 9, 2, 3, 4, 1, 2, 3], dtype=np.int32))
    (4, 3)
    """
    first = max(0, len(tokens) - WINDOW)
    text = tokens[first:].tobytes()  # what searches bytes is one short loop, and warm where NumPy's parts are not
    end, length = len(text) - 4, 0
    for longer in range(1, min(LONGEST, end // 4) + 1):
        found = _rfind(text, text[-4 * longer :], end)
        if found < 0:
            break
        end, length = found + 4 * longer, longer
    return (first + end // 4, length) if length else (0, 0)


def _rfind(text: bytes, part: bytes, end: int) -> int:
    """Where `part` stands last in text[:end] at a multiple of four; -1 if nowhere, or behind too many other places."""
    for _ in range(MISSES):
        found = text.rfind(part, 0, end)
        if found < 0 or not found % 4:
            return found
        end = found + len(part) - 1
    return -1


class PromptLookup:
    """The guesses for one text."""

    def __init__(self) -> None:
        self._right = [share * EXPECTED_WEIGHT for share in EXPECTED]
        self._tried = [EXPECTED_WEIGHT] * len(EXPECTED)
        self._length = 0  # of the match behind the last guesses
        self._pause = 0

    def is_due(self) -> bool:
        """Whether it is time to look again, asked once a step."""
        if not self._pause:
            return True
        self._pause -= 1
        return False

    def guess(self, tokens: IntArray, most: int, price: float, entry: float, pause: int = 0) -> list[int]:
        """Up to `most` tokens that may follow tokens [n]. Each costs `price` and the first one `entry` besides, in what
        a token saved is worth. Without any that seems to pay, it is due again after `pause` steps."""
        self._pause = pause
        place, length = find_place(tokens)
        if not length:
            return []
        self._length, count, chance, gain = length, 0, 1.0, -entry
        while count < min(most, MOST):
            kind = self._kind(length + count)  # where the guesses before it are right, its match is as much longer
            chance *= self._right[kind] / self._tried[kind]
            if chance < price:
                break
            gain += chance - price
            count += 1
        if gain <= 0 or not count:
            self._renew(self._kind(length))
            return []
        self._pause = 0
        guesses: list[int] = np.resize(tokens[place : place + count], count).tolist()  # a place near the end goes round
        return guesses

    def learn(self, num_guessed: int, num_right: int) -> None:
        """How the last guesses turned out: those behind the first wrong one tell nothing."""
        for i in range(min(num_right + 1, num_guessed)):
            kind = self._kind(self._length + i)
            self._right[kind] = REMEMBERED * self._right[kind] + (i < num_right)
            self._tried[kind] = REMEMBERED * self._tried[kind] + 1

    def _renew(self, kind: int) -> None:
        self._right[kind] += RENEWED * (EXPECTED[kind] * EXPECTED_WEIGHT - self._right[kind])
        self._tried[kind] += RENEWED * (EXPECTED_WEIGHT - self._tried[kind])

    @staticmethod
    def _kind(length: int) -> int:
        return min(length, LONGEST) - 1
