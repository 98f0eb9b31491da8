"""Short ways to the end of a text, found by trying, where there is no automaton to read them from.

Knows: what a walker allows. Must not know: grammars, budgets or sampling. States cannot be told apart, so a way
is sought with a few fixed preferences, and what is found is proved by having been walked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

MAX_STEPS = 1024  # of one way; at some 7 us each
MAX_CLOSED = 64
LONG = 128  # tokens of a way that is good enough: looking for a shorter one takes as long again
_CLOSING = b'"}])'
_NEXT = b","  # behind what closes: a member of a record ends sooner so than by another digit
_INSIDE = b".-@:/,;_ '\\T+"
_REST = bytes(range(ord("a"), ord("z") + 1)) + bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(33, 127))
_PREFERENCES = (
    _CLOSING + _NEXT + b'0123456789nu"[{' + _INSIDE + b"aetfsx",
    _CLOSING + _NEXT + b'nutfae[{"0123456789' + _INSIDE,
    b"]})" + _NEXT + b'0123456789n"[{' + _INSIDE + b"aetfsx",
    b"]})" + _NEXT + b'[{"0123456789' + _INSIDE + b"aetfsx",
)


class Walker(Protocol):
    """A copy of a matcher that may be spoilt."""

    def forced(self) -> list[int]: ...
    def can(self, token: int) -> bool: ...
    def go(self, tokens: Sequence[int]) -> bool: ...
    def any(self) -> int | None: ...
    @property
    def is_done(self) -> bool: ...


class Seeker:
    """Finds short ways to an end for one vocabulary; `singles` maps each byte to the token of just that byte.

    >>> Seeker({34: 1}).seek(make_walker, 20)                             # doctest: +SKIP
    [1]
    """

    def __init__(self, singles: dict[int, int]) -> None:
        self._orders = [
            [singles[byte] for byte in dict.fromkeys(order + _REST) if byte in singles] for order in _PREFERENCES
        ]
        self._closing = {singles[byte] for byte in _CLOSING if byte in singles}
        self._quote, self._escape = singles.get(ord('"')), singles.get(ord("\\"))
        self._only_in_texts = singles.get(ord("~"))

    def seek(self, walker: Callable[[], Walker], limit: int) -> list[int] | None:
        """The shortest of the ways that the preferences find, at most `limit` tokens; None where none does.

        Where the first that is found is long there is no look for a shorter one: a model waits, and all its neighbours.
        """
        best: list[int] | None = None
        for order in self._orders:
            found = self._walk(walker(), order, limit if best is None else len(best) - 1)
            best = found if found is not None else best
            if best is not None and len(best) > LONG:
                break
        return best

    def _walk(self, walker: Walker, order: list[int], limit: int) -> list[int] | None:
        """One way: what is forced, else what closes, else what was chosen least so far, in the given order."""
        tokens: list[int] = []
        used: dict[int, int] = {}
        for _ in range(MAX_STEPS):
            if walker.is_done:
                return tokens
            ahead = walker.forced() or self._choice(walker, order, used)
            if not ahead or len(tokens) + len(ahead) > limit or not walker.go(ahead):
                return None
            tokens += ahead
            if ahead == [self._quote] and tokens[-2:-1] != [self._escape]:
                used.clear()  # a text ended, and what it took to end it says nothing of what comes
        return None

    def _choice(self, walker: Walker, order: list[int], used: dict[int, int]) -> list[int]:
        best, fewest = None, MAX_STEPS
        for token in order:
            times = used.get(token, 0)
            if times < fewest and walker.can(token):
                best, fewest = token, times
                if not times or (token in self._closing and times < MAX_CLOSED and self._closes(token, walker)):
                    break
        if best is None:
            best = walker.any()
        if best is None:
            return []
        used[best] = used.get(best, 0) + 1
        return [best]

    def _closes(self, token: int, walker: Walker) -> bool:
        """Whether a quote or bracket closes something here: in a text a bracket is a letter like others."""
        return token == self._quote or self._only_in_texts is None or not walker.can(self._only_in_texts)
