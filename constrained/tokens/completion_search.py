"""Searches short completions of a text by trial, for grammars without an automaton to read them from.

The states of such a grammar cannot be compared, so the search follows a few fixed preferences. A completion that it
finds is correct, because the walker accepted each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

MAX_STEPS = 1024  # tokens tried in one search, about 7 us each
MAX_CLOSING_REPEATS = 64
GOOD_ENOUGH_TOKENS = 128  # a completion of up to so many tokens ends the search: a shorter one would take as long again
_CLOSING = b'"}])'
_SEPARATOR = b","  # after the closing characters: a comma ends a member sooner than another digit does
_PUNCTUATION = b".-@:/,;_ '\\T+"
_REST = bytes(range(ord("a"), ord("z") + 1)) + bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(33, 127))
_PREFERENCES = (
    _CLOSING + _SEPARATOR + b'0123456789nu"[{' + _PUNCTUATION + b"aetfsx",
    _CLOSING + _SEPARATOR + b'nutfae[{"0123456789' + _PUNCTUATION,
    b"]})" + _SEPARATOR + b'0123456789n"[{' + _PUNCTUATION + b"aetfsx",
    b"]})" + _SEPARATOR + b'[{"0123456789' + _PUNCTUATION + b"aetfsx",
)


class Walker(Protocol):
    """A copy of a matcher that the search may advance."""

    def forced_tokens(self) -> list[int]: ...
    def is_allowed(self, token: int) -> bool: ...
    def closing_mark(self, text_token: int | None) -> list[int]: ...
    def advance(self, tokens: Sequence[int]) -> bool: ...
    def any_allowed_token(self) -> int | None: ...
    @property
    def named_tokens(self) -> Sequence[int]: ...
    @property
    def is_complete(self) -> bool: ...


class CompletionSearch:
    """Finds short completions. `single_byte_tokens` maps each byte to the token of just that byte.

    >>> CompletionSearch({34: 1}).search(make_walker, 20)                             # doctest: +SKIP
    [1]
    """

    def __init__(self, single_byte_tokens: dict[int, int]) -> None:
        self._orders = [
            [single_byte_tokens[byte] for byte in dict.fromkeys(order + _REST) if byte in single_byte_tokens]
            for order in _PREFERENCES
        ]
        self._closing = {single_byte_tokens[byte] for byte in _CLOSING if byte in single_byte_tokens}
        self._quote, self._escape = single_byte_tokens.get(ord('"')), single_byte_tokens.get(ord("\\"))
        self._string_only_token = single_byte_tokens.get(ord("~"))
        self._at = single_byte_tokens.get(ord("@"))

    def search(self, walker: Callable[[], Walker], limit: int) -> list[int] | None:
        """Returns the shortest completion that the preferences find, at most `limit` tokens; None if they find none.

        After a long completion no shorter one is searched, because all requests of the batch wait meanwhile.
        """
        best: list[int] | None = None
        for order in self._orders:
            tokens = self._search_once(walker(), order, limit if best is None else len(best) - 1)
            best = tokens if tokens is not None else best
            if best is not None and len(best) > GOOD_ENOUGH_TOKENS:
                break
        return best

    def _search_once(self, walker: Walker, order: list[int], limit: int) -> list[int] | None:
        """Tries one completion: forced tokens, else closing ones, else those used least so far, in the given order."""
        tokens: list[int] = []
        order = [*walker.named_tokens, *order]
        use_counts: dict[int, int] = {}
        for _ in range(MAX_STEPS):
            if walker.is_complete:
                return tokens
            next_tokens = walker.forced_tokens() or walker.closing_mark(self._string_only_token)
            next_tokens = next_tokens or self._choose_token(walker, order, use_counts)
            if not next_tokens or len(tokens) + len(next_tokens) > limit or not walker.advance(next_tokens):
                return None
            tokens += next_tokens
            if next_tokens == [self._quote] and tokens[-2:-1] != [self._escape]:
                use_counts.clear()  # a string ended; its characters must not influence the choices after it
            elif self._at is not None and next_tokens == [self._at]:
                use_counts = {self._at: use_counts.get(self._at, 0)}  # so did the name in an address
        return None

    def _choose_token(self, walker: Walker, order: list[int], use_counts: dict[int, int]) -> list[int]:
        best, fewest = None, MAX_STEPS
        for token in order:
            times = use_counts.get(token, 0)
            if times < fewest and walker.is_allowed(token):
                best, fewest = token, times
                if not times or (
                    token in self._closing and times < MAX_CLOSING_REPEATS and self._closes_value(token, walker)
                ):
                    break
        if best is None:
            best = walker.any_allowed_token()
        if best is None:
            return []
        use_counts[best] = use_counts.get(best, 0) + 1
        return [best]

    def _closes_value(self, token: int, walker: Walker) -> bool:
        """Returns whether a quote or bracket closes a value; inside a string a bracket is an ordinary character."""
        return token == self._quote or self._string_only_token is None or not walker.is_allowed(self._string_only_token)
