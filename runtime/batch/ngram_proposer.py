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

from plait.runtime.kv_cache.page_pool import IntArray

LOOKBACK_TOKENS = 1 << 14  # how far back is looked
MAX_MISALIGNED_MATCHES = 64  # places that are none, at most, before a search is given up
MAX_DRAFT_TOKENS = 24  # tokens guessed at once

# Right guesses behind a match of 1, 2, ... tokens and of more, before any count, as in prose, where they are 0.19,
# 0.41, 0.60, 0.69, 0.72 and 0.90, but for the short ones, whose tries cost most.
PRIOR_ACCEPTANCE = (0.15, 0.35, 0.6, 0.7, 0.8, 0.9)
PRIOR_WEIGHT = 4.0  # in guesses
COUNT_DECAY = 0.9  # of the counts, at each guess
PRIOR_RECOVERY = 0.01  # of the way back to what is expected, each time that a guess is not worth trying

MAX_NGRAM = len(PRIOR_ACCEPTANCE)  # tokens compared


def find_ngram_match(tokens: IntArray) -> tuple[int, int]:
    """(i, n): the last n of tokens [m] int32, at most LONGEST, also stand right before place i, which is the latest of
    the places with the most; n = 0 without any.

    >>> find_ngram_match(np.array([5, 1, 2, 3, 8, 9, 2, 3, 4, 1, 2, 3], dtype=np.int32))
    (4, 3)
    """
    first = max(0, len(tokens) - LOOKBACK_TOKENS)
    text = tokens[first:].tobytes()  # what searches bytes is one short loop, and warm where NumPy's parts are not
    end, length = len(text) - 4, 0
    for longer in range(1, min(MAX_NGRAM, end // 4) + 1):
        found = _rfind(text, text[-4 * longer :], end)
        if found < 0:
            break
        end, length = found + 4 * longer, longer
    return (first + end // 4, length) if length else (0, 0)


def _rfind(text: bytes, part: bytes, end: int) -> int:
    """Where `part` stands last in text[:end] at a multiple of four; -1 if nowhere, or behind too many other places."""
    for _ in range(MAX_MISALIGNED_MATCHES):
        found = text.rfind(part, 0, end)
        if found < 0 or not found % 4:
            return found
        end = found + len(part) - 1
    return -1


class NgramProposer:
    """The guesses for one text."""

    def __init__(self) -> None:
        self._accepted = [share * PRIOR_WEIGHT for share in PRIOR_ACCEPTANCE]
        self._proposed = [PRIOR_WEIGHT] * len(PRIOR_ACCEPTANCE)
        self._match_length = 0  # of the match behind the last guesses
        self._cooldown = 0

    def is_due(self) -> bool:
        """Whether it is time to look again, asked once a step."""
        if not self._cooldown:
            return True
        self._cooldown -= 1
        return False

    def propose(
        self, tokens: IntArray, max_draft: int, token_cost: float, first_token_cost: float, cooldown_steps: int = 0
    ) -> list[int]:
        """Up to `max_draft` tokens that may follow tokens [n]. Each costs `token_cost` and the first one `first_token_cost` besides, in what
        a token saved is worth. Without any that seems to pay, it is due again after `cooldown_steps` steps."""
        self._cooldown = cooldown_steps
        place, length = find_ngram_match(tokens)
        if not length:
            return []
        self._match_length, count, chance, gain = length, 0, 1.0, -first_token_cost
        while count < min(max_draft, MAX_DRAFT_TOKENS):
            bucket = self._length_bucket(
                length + count
            )  # where the guesses before it are right, its match is as much longer
            chance *= self._accepted[bucket] / self._proposed[bucket]
            if chance < token_cost:
                break
            gain += chance - token_cost
            count += 1
        if gain <= 0 or not count:
            self._recover_prior(self._length_bucket(length))
            return []
        self._cooldown = 0
        draft: list[int] = np.resize(tokens[place : place + count], count).tolist()  # a place near the end goes round
        return draft

    def record_outcome(self, num_proposed: int, num_accepted: int) -> None:
        """How the last guesses turned out: those behind the first wrong one tell nothing."""
        for i in range(min(num_accepted + 1, num_proposed)):
            bucket = self._length_bucket(self._match_length + i)
            self._accepted[bucket] = COUNT_DECAY * self._accepted[bucket] + (i < num_accepted)
            self._proposed[bucket] = COUNT_DECAY * self._proposed[bucket] + 1

    def _recover_prior(self, bucket: int) -> None:
        self._accepted[bucket] += PRIOR_RECOVERY * (PRIOR_ACCEPTANCE[bucket] * PRIOR_WEIGHT - self._accepted[bucket])
        self._proposed[bucket] += PRIOR_RECOVERY * (PRIOR_WEIGHT - self._proposed[bucket])

    @staticmethod
    def _length_bucket(length: int) -> int:
        return min(length, MAX_NGRAM) - 1
