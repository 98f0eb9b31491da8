"""Bounds the digits of JSON numbers, which a schema may leave unbounded: a small model may write zeros forever."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.constrained.grammar import pack_mask
from plait.constrained.tokens.byte_trie import flatten
from plait.constrained.tokens.json_scanner import ALL_JSON, JsonRegions, ends_in_string

MAX_DIGITS = 23
"""The digits of the longest shortest-form double: 21 as Python writes it, 23 as JavaScript does (ECMA-262,
Number::toString: 0.0000012345678901234567)."""
MAX_EXPONENT_DIGITS = 3
_MAX_LITERAL_DIGITS = 400  # digits of the longest double written without an exponent, 5e-324 with all that it can have
_DIGITS = b"0123456789"
_BOUND = re.compile(r'"(?:exclusiveM|m)(?:in|ax)imum"\s*:\s*-?[0-9.eE+-]+')  # continues where it needs more digits
_LONG_LITERAL = re.compile(rf"[0-9][0-9.]{{{MAX_DIGITS},}}|[0-9.]+[eE][+-]?[0-9]{{1,3}}(?![0-9])")


class NumberLimiter:
    """Tells which tokens of one vocabulary continue a number. `token_bytes[id]`: the bytes of each token.

    >>> NumberLimiter((b"0", b",")).continues_number(0), NumberLimiter((b"0", b",")).continues_number(1)
    (True, False)
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        text, offsets, lengths = flatten(token_bytes)
        heads, tails = np.zeros(len(token_bytes), np.uint8), np.zeros(len(token_bytes), np.uint8)
        has_text = lengths > 0
        heads[has_text], tails[has_text] = text[offsets[has_text]], text[(offsets + lengths)[has_text] - 1]
        self._continues = np.isin(heads, np.frombuffer(_DIGITS + b".eE", np.uint8))
        self._non_number_mask = pack_mask(~self._continues)  # int32 [ceil(V/32)]
        self._quote_mask = pack_mask(heads == ord('"'))
        self._ends_in_digit = np.isin(tails, np.frombuffer(_DIGITS, np.uint8)).tobytes()

    def continues_number(self, token: int) -> bool:
        """Returns whether the token, after a number, continues it."""
        return bool(self._continues[token])

    def is_at_digit_limit(
        self,
        tokens: Sequence[int],
        max_digits: int = MAX_DIGITS,
        json_regions: JsonRegions = ALL_JSON,
        control_texts: Mapping[int, bytes] | None = None,
    ) -> bool:
        """Returns whether the text of `tokens` ends in a number that has `max_digits` digits already.

        `json_regions` says where the text contains JSON; `control_texts`, what control tokens count as in it.
        """
        if not tokens or not self._ends_in_digit[tokens[-1]]:
            return False
        end = b""
        for token in reversed(tokens):
            end = self._token_bytes[token] + end
            if len(end) >= 2 * max_digits:
                break
        if _at_limit_pattern(max_digits).search(end) is None:
            return False
        texts = control_texts or {}
        return not ends_in_string(
            b"".join(texts.get(token) or self._token_bytes[token] for token in tokens), json_regions
        )

    def forbid_continuation(self, mask: NDArray[np.int32]) -> None:
        """Removes the tokens that continue a number from `mask`, int32 [ceil(V/32)], if other tokens remain.

        A number that the schema requires to be longer continues.
        """
        ending = mask & self._non_number_mask
        if ending.any() and not (mask & self._quote_mask).any():  # a quote cannot follow a number: this is free text
            mask[:] = ending


@lru_cache(maxsize=16)
def _at_limit_pattern(max_digits: int) -> re.Pattern[bytes]:
    """Returns the pattern of a text that ends in `max_digits` digits, or in the most digits an exponent may have."""
    return re.compile(rb"(?:[0-9]\.?){%d}\Z|[0-9][eE][+-]?[0-9]{%d}\Z" % (max_digits, MAX_EXPONENT_DIGITS))


def digit_limit(schema: str) -> int:
    """Returns the digits that a number may have under this JSON Schema text.

    That is MAX_DIGITS, or more if the schema lists a longer number, which the library writes without an exponent.

    >>> digit_limit('{"enum": [1, 1e30]}'), digit_limit('{"maximum": 1e300}')
    (31, 23)
    """
    max_digits = MAX_DIGITS
    for literal in _LONG_LITERAL.findall(_BOUND.sub("", schema)):
        mantissa, _, exponent = literal.lower().partition("e")
        integer, _, fraction = mantissa.partition(".")
        shift = int(exponent or 0)
        max_digits = max(max_digits, len(integer) + max(shift, 0) + max(len(fraction) - shift, 0))
    return min(max_digits, _MAX_LITERAL_DIGITS)
