"""Where a JSON number that goes on and on has to end: nothing in a schema without bounds says so, and a small model
may write zeros for ever.

Knows: the bytes of tokens, packed masks, and how JSON writes numbers and texts. Must not know: grammars, or the
library that follows them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.constrained.json_strings import ALL_JSON, Calls, ends_in_string

MAX_DIGITS = 23
"""As many as the shortest text of any double has: 21 where Python writes it, 23 where JavaScript does (ECMA-262,
Number::toString: 0.0000012345678901234567)."""
MAX_EXPONENT_DIGITS = 3
_MOST_LISTED = 400  # digits of the longest double written without an exponent, 5e-324 with all that it can have
_DIGITS = b"0123456789"
_LISTED = re.compile(rf"[0-9][0-9.]{{{MAX_DIGITS},}}|[0-9.]+[eE][+-]?[0-9]{{1,3}}(?![0-9])")


class LongNumbers:
    """Which tokens of one vocabulary would make a number longer. `token_bytes[id]` is what each adds to the text.

    >>> LongNumbers((b"0", b",")).goes_on(0), LongNumbers((b"0", b",")).goes_on(1)
    (True, False)
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        heads = np.frombuffer(b"".join(token[:1] or b"\0" for token in token_bytes), np.uint8)
        self._going_on = np.isin(heads, np.frombuffer(_DIGITS + b".eE", np.uint8))
        self._others = _packed(~self._going_on)  # int32 [ceil(V/32)]
        self._quotes = _packed(heads == ord('"'))
        self._ends_in_digit = bytes(token[-1:] in _DIGITS and token != b"" for token in token_bytes)

    def goes_on(self, token: int) -> bool:
        """Whether the token, behind a number, is more of it."""
        return bool(self._going_on[token])

    def is_long(self, tokens: Sequence[int], most: int = MAX_DIGITS, calls: Calls = ALL_JSON) -> bool:
        """Whether the text of `tokens` ends in a number with the `most` digits that one may have. `calls` says where
        the text has JSON."""
        if not tokens or not self._ends_in_digit[tokens[-1]]:
            return False
        end = b""
        for token in reversed(tokens):
            end = self._token_bytes[token] + end
            if len(end) >= 2 * most:
                break
        if _long(most).search(end) is None:
            return False
        return not ends_in_string(b"".join(self._token_bytes[token] for token in tokens), calls)

    def end(self, mask: NDArray[np.int32]) -> None:
        """Takes what would make the number longer out of `mask`, int32 [ceil(V/32)], where anything else is in it; a
        number that must go on, since the schema says so, does."""
        ending = mask & self._others
        if ending.any() and not (mask & self._quotes).any():  # behind a number no quote can come: this is free text
            mask[:] = ending


@lru_cache(maxsize=16)
def _long(most: int) -> re.Pattern[bytes]:
    """What ends in `most` digits, or in as many as an exponent may have."""
    return re.compile(rb"(?:[0-9]\.?){%d}\Z|[0-9][eE][+-]?[0-9]{%d}\Z" % (most, MAX_EXPONENT_DIGITS))


def most_digits(schema: str) -> int:
    """The digits that a number by the schema of this JSON text may have: more than MAX_DIGITS where it lists one that
    has more, which the library writes without an exponent.

    >>> most_digits('{"enum": [1, 1e30]}'), most_digits('{"type": "number"}')
    (31, 23)
    """
    most = MAX_DIGITS
    for listed in _LISTED.findall(schema):
        mantissa, _, exponent = listed.lower().partition("e")
        whole, _, fraction = mantissa.partition(".")
        shift = int(exponent or 0)
        most = max(most, len(whole) + max(shift, 0) + max(len(fraction) - shift, 0))
    return min(most, _MOST_LISTED)


def _packed(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    """A bit for each flag, int32 [ceil(V/32)]."""
    words = np.zeros(4 * ((len(flags) + 31) // 32), np.uint8)
    bits = np.packbits(flags, bitorder="little")
    words[: len(bits)] = bits
    return words.view(np.int32)
