"""Prompt lookup decoding: proposes draft tokens by finding where the text's last tokens occurred before.

    ... the answer is forty two . [...] so the answer is | forty two .
                                           -------------   draft

The model verifies the draft in one forward pass together with the token before it. Draft tokens that it would have
chosen itself are accepted, so the output is the same and takes fewer steps. Blockwise verification: Stern et al. 2018,
arXiv 1811.03115.

Long matches are right more often than short ones, and copied text more often than prose. So each text counts the
acceptance rate of its drafts by the length of the match. A draft is as long as its tokens are likely enough to be
accepted to pay for their rows of the step. A draft that is not expected to pay is not tried.
"""

from __future__ import annotations

import numpy as np

from plait.runtime.arrays import IntArray

LOOKBACK_TOKENS = 1 << 14  # how far back a match is searched
MAX_MISALIGNED_MATCHES = 64  # byte matches inside a token after which a search is given up
MAX_DRAFT_TOKENS = 24

# Assumed acceptance rate after a match of 1, 2, ... tokens or more, before anything is counted. These are the rates
# measured on prose (0.19, 0.41, 0.60, 0.69, 0.72, 0.90), lowered for short matches, whose trials cost most.
PRIOR_ACCEPTANCE = (0.15, 0.35, 0.6, 0.7, 0.8, 0.9)
PRIOR_WEIGHT = 4.0  # draft tokens that the prior counts for
COUNT_DECAY = 0.9  # factor on the counts at each verified token
PRIOR_RECOVERY = 0.01  # step back towards the prior each time that a draft does not pay

MAX_NGRAM = len(PRIOR_ACCEPTANCE)  # tokens compared


def find_ngram_match(tokens: IntArray) -> tuple[int, int]:
    """Finds the longest suffix of tokens [m] int32, up to MAX_NGRAM, that also occurs earlier.

    Returns (i, n): the last n tokens also occur directly before index i, at the latest such index; (0, 0) without any.

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


class NgramProposer:
    """Proposes drafts for one text and tracks their acceptance rate."""

    def __init__(self) -> None:
        self._accepted = [rate * PRIOR_WEIGHT for rate in PRIOR_ACCEPTANCE]
        self._proposed = [PRIOR_WEIGHT] * len(PRIOR_ACCEPTANCE)
        self._match_length = 0  # of the last draft
        self._cooldown = 0

    def is_due(self) -> bool:
        """Whether to call `propose` in this step. Called once a step; counts down the cooldown."""
        if not self._cooldown:
            return True
        self._cooldown -= 1
        return False

    def propose(
        self, tokens: IntArray, max_draft: int, token_cost: float, first_token_cost: float, cooldown_steps: int = 0
    ) -> list[int]:
        """Returns up to `max_draft` tokens that may follow tokens [n] int32.

        A draft token costs `token_cost`, and the first one `first_token_cost` in addition, relative to the value of one
        saved decode step. If no draft is expected to pay, returns [] and is due again after `cooldown_steps` steps.
        """
        self._cooldown = cooldown_steps
        match_end, length = find_ngram_match(tokens)
        if not length:
            return []
        self._match_length, count, probability, gain = length, 0, 1.0, -first_token_cost
        while count < min(max_draft, MAX_DRAFT_TOKENS):
            bucket = self._length_bucket(length + count)  # each accepted token makes the match longer
            probability *= self._accepted[bucket] / self._proposed[bucket]
            if probability < token_cost:
                break
            gain += probability - token_cost
            count += 1
        if gain <= 0 or not count:
            self._recover_prior(self._length_bucket(length))
            return []
        self._cooldown = 0
        draft: list[int] = np.resize(tokens[match_end : match_end + count], count).tolist()  # repeats at the text's end
        return draft

    def record_outcome(self, num_proposed: int, num_accepted: int) -> None:
        """Counts the verified tokens of the last draft: the accepted ones and the first rejected one."""
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
