"""The value of a constrained call whose constraint includes the text after it: which output belongs to the value.

output   4 | 2 | legs | .        tokens
value    4 | 2                   what the client gets; the session's text keeps all of it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from plait.constrained.trailing_text_matcher import TrailingText


class ValueEnd(NamedTuple):
    """Where a value ended: after `num_whole` output tokens and the text of `last_tokens`.

    `last_tokens` spell the value's part of a token that also begins the text after it. `num_tokens`: output tokens
    with a part of the value.
    """

    num_whole: int
    last_tokens: list[int]
    num_tokens: int


class ValueSpan:
    """The output of one call, seen as a value and the text `trailing_text` behind it."""

    def __init__(self, trailing_text: TrailingText) -> None:
        self.trailing_text = trailing_text
        self.trailing_start = 0  # output bytes from here on may belong to the text after the value
        self.end: ValueEnd | None = None
        self._unscanned = bytearray()  # output bytes that were not searched for stop strings
        self._num_scanned = 0

    def num_tokens_begun(self, byte_ends: Sequence[int], new_lengths: Sequence[int] = ()) -> int:
        """Returns how many tokens begin in the value.

        `byte_ends[i]`: length in bytes of tokens 0 to i. `new_lengths`: those of further tokens.
        """
        if not self.trailing_start:
            return 0
        count = min(len(byte_ends), 1 + bisect_left(byte_ends, self.trailing_start))
        start = byte_ends[-1] if byte_ends else 0
        for length in new_lengths:
            count += start < self.trailing_start
            start += length
        return count

    def take_unscanned(self, new_bytes: bytes) -> bytes:
        """Appends output bytes. Returns those that belong to the value and were not returned before."""
        self._unscanned += new_bytes
        taken = bytes(self._unscanned[: max(0, self.trailing_start - self._num_scanned)])
        del self._unscanned[: len(taken)]
        self._num_scanned += len(taken)
        return taken
