"""Keeps the masks of a grammar at the beginning that all its texts have in common."""

from __future__ import annotations

from collections.abc import Sequence

from plait.constrained.grammar import Int32Array

MAX_MASKS = 24
SLOW_S = 50e-6  # a mask that took longer is kept; most take less than 5 us, and finding one takes 0.2 us


class MaskCache:
    """The mask at the start of a text, and at most `MAX_MASKS` - 1 slow ones within `forced`, of `num_words` int32.

    forced: the bytes with which every text of the grammar begins. token_bytes: of all tokens. Texts of all users share
    the masks, so that none is kept after bytes that a model has chosen: it would be faster the second time, which tells
    one user how a value of another one began.

    >>> masks = MaskCache(1, b"{", (b"{", b"a"))
    >>> masks.put([0], np.array([7], np.int32), seconds=0.001)            # doctest: +SKIP
    >>> masks.get([0])                                                    # doctest: +SKIP
    array([7], dtype=int32)
    """

    def __init__(self, num_words: int, forced: bytes, token_bytes: Sequence[bytes]) -> None:
        self.max_bytes = 4 * num_words * MAX_MASKS
        self.slow_s = SLOW_S
        self._forced, self._token_bytes = forced, token_bytes
        self._initial: Int32Array | None = None
        self._masks: dict[tuple[int, ...], Int32Array] = {}

    def get(self, tokens: Sequence[int]) -> Int32Array | None:
        """Returns the mask after `tokens`, int32 [num_words], not to be changed; None if it is not kept."""
        if not tokens:
            return self._initial
        return self._masks.get(tuple(tokens)) if self._masks and len(tokens) <= len(self._forced) else None

    def put(self, tokens: Sequence[int], mask: Int32Array, seconds: float) -> None:
        """Keeps a copy of the mask after `tokens` if they are none, or if all texts begin so and it took long."""
        if not tokens:
            self._initial = mask.copy()
        elif seconds > self.slow_s and len(self._masks) < MAX_MASKS - 1 and self._is_forced(tokens):
            self._masks[tuple(tokens)] = mask.copy()

    def _is_forced(self, tokens: Sequence[int]) -> bool:
        if len(tokens) > len(self._forced):
            return False
        return self._forced.startswith(b"".join(self._token_bytes[token] for token in tokens))
