"""Keeps the slow masks of a grammar by the tokens before them, for the texts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence

from plait.constrained.grammar import Int32Array

MAX_MASKS = 24
MAX_TOKENS = 24  # of a text whose masks are kept
SLOW_S = 50e-6  # a mask that took longer is kept; most take less than 5 us, and finding one takes 0.2 us


class MaskCache:
    """The mask at the start of a text, and at most `MAX_MASKS` - 1 others of `num_words` int32.

    Those after fewer tokens are kept first: all texts that need a mask also need the ones before it. Of equal lengths
    the last ones added are kept.

    An object with thousands of properties takes 20 ms for the mask of its first name. All texts of a grammar begin
    alike, so a mask is the same wherever the tokens before it are.

    >>> masks = MaskCache(1)
    >>> masks.put([5], np.array([7], np.int32), seconds=0.001)            # doctest: +SKIP
    >>> masks.get([5])                                                    # doctest: +SKIP
    array([7], dtype=int32)
    """

    def __init__(self, num_words: int) -> None:
        self.max_bytes = 4 * num_words * MAX_MASKS
        self.slow_s = SLOW_S
        self._initial: Int32Array | None = None
        self._masks: dict[tuple[int, ...], Int32Array] = {}

    def get(self, tokens: Sequence[int]) -> Int32Array | None:
        """Returns the mask after `tokens`, int32 [num_words], not to be changed; None if it is not kept."""
        if not tokens:
            return self._initial
        return self._masks.get(tuple(tokens)) if self._masks and len(tokens) <= MAX_TOKENS else None

    def put(self, tokens: Sequence[int], mask: Int32Array, seconds: float) -> None:
        """Keeps a copy of the mask after `tokens` if it is that of the start, or if computing it took long."""
        if not tokens:
            self._initial = mask.copy()
        elif seconds > self.slow_s and len(tokens) <= MAX_TOKENS:
            if len(self._masks) >= MAX_MASKS - 1:
                longest = max(self._masks, key=len)
                if len(longest) < len(tokens):
                    return
                del self._masks[longest]
            self._masks[tuple(tokens)] = mask.copy()
