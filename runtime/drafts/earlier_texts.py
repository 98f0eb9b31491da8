"""Earlier texts: guesses the token that followed the same context in other texts, of one namespace and one constraint.

Branches of a fork, samples of one prompt and the calls of a program over many records write the same words at the same
places; and a constraint that leaves a choice, of a key, an enum's value or the end of a value, is often answered as
before. A context is one of

    the last 8, 4 or 2 tokens
    the tokens before the place where the constraint last forced some, and the number of tokens since

and a guess is the token that lately followed the context. Its level tells which context it was, how often in a row the
token was right there, and whether a value begins: where its first token is open, the others say little. The last kind
of context knows how long the values of a field are: `4 2` after `"age": ` ends with `,` whatever the digits are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar

from plait.runtime.arrays import IntArray
from plait.runtime.drafts.proposer import Guess

LENGTHS = (8, 4, 2)  # tokens of a context
FORCED_LENGTH = 4  # tokens before the place where a constraint last forced some
MAX_SINCE_FORCED = 32
NUM_SLOTS = 1 << 16  # of a table, 8 bytes each
NUM_COUNTS = 4  # levels of a context: its token was right once, twice, three times, more often
COUNT_BITS, TOKEN_BITS = 3, 29


class EarlierTexts:
    """The token that lately followed each context, in a table of a fixed size.

    A slot holds a context's check bits, its token, and how often the token was right. A wrong one halves the count and
    replaces the token at 0; so do contexts that fall on the same slot, and what was not used lately is forgotten. The
    memory is taken with the first text, and given back with `close`, after which nothing is learned.
    """

    def __init__(self) -> None:
        self._slots: array[int] | None = None
        self._is_closed = False

    def close(self) -> None:
        """Forgets all texts, also those of requests that still run."""
        self._slots, self._is_closed = None, True

    def find(self, context: int) -> tuple[int, int]:
        """Returns (token, count) of a context, a number of 64 bits; the count is 0 for an unknown one."""
        slot = 0 if self._slots is None else self._slots[context % NUM_SLOTS]
        if slot >> 32 != context >> 32:
            return 0, 0
        return slot >> COUNT_BITS & ((1 << TOKEN_BITS) - 1), slot & ((1 << COUNT_BITS) - 1)

    def add(self, context: int, token: int) -> None:
        """Learns that `token` followed the context."""
        if self._is_closed:
            return
        if self._slots is None:
            self._slots = array("Q", bytes(8 * NUM_SLOTS))
        slot = self._slots[context % NUM_SLOTS]
        entry, count = slot >> COUNT_BITS, slot & ((1 << COUNT_BITS) - 1)
        added = context >> 32 << TOKEN_BITS | token
        if entry == added:
            count = min(count + 1, (1 << COUNT_BITS) - 1)
        elif count > 1:
            count //= 2
        else:
            entry, count = added, 1
        self._slots[context % NUM_SLOTS] = entry << COUNT_BITS | count


class EarlierTextsProposer:
    """A `Proposer` that looks in `texts`, and adds what it is told. salt: of the constraint. start: of the output."""

    prior: ClassVar[tuple[float, ...]] = (
        *(0.75, 0.85, 0.9, 0.95),
        *(0.6, 0.75, 0.85, 0.9),
        *(0.3, 0.45, 0.55, 0.65),
        *(0.25, 0.45, 0.6, 0.7),
        *(0.3, 0.5, 0.7, 0.8) * (len(LENGTHS) + 1),  # where a value begins, directly behind forced tokens
    )

    def __init__(self, texts: EarlierTexts, salt: int, start: int) -> None:
        self._texts, self._salt = texts, salt
        self._num_known = self._forced_end = start  # tokens of the text that are added; see `Proposer.guesses`
        self._num_forced = 0  # forced positions before `_num_known`

    def guesses(self, text: IntArray, forced_end: int) -> list[Guess]:
        """See `Proposer`: at most one guess of each context."""
        found, first_level = [], len(self.prior) // 2 if len(text) == forced_end else 0
        for place, context in enumerate(self._contexts(text, len(text), forced_end)):
            token, count = self._texts.find(context)
            if count:
                found.append(Guess(token, first_level + NUM_COUNTS * place + min(count, NUM_COUNTS) - 1))
        return found

    def accept(self, text: IntArray, forced: Sequence[int]) -> None:
        """See `Proposer`. Forced tokens are not added, as they are not guessed."""
        for position in range(self._num_known, len(text)):
            if self._num_forced < len(forced) and forced[self._num_forced] == position:
                self._num_forced += 1
                self._forced_end = position + 1
                continue
            for context in self._contexts(text, position, self._forced_end):
                self._texts.add(context, int(text[position]))
        self._num_known = len(text)

    def _contexts(self, text: IntArray, end: int, forced_end: int) -> list[int]:
        """Returns the contexts of position `end`, each hashed to 64 bits."""
        last = text[max(0, end - LENGTHS[0]) : end].tolist()
        keys = [(self._salt, *last[-length:]) for length in LENGTHS]
        if end - forced_end < MAX_SINCE_FORCED:
            before = text[max(0, forced_end - FORCED_LENGTH) : forced_end].tolist()
            keys.append((self._salt, forced_end - end - 1, *before))
        return [hash(key) & ((1 << 64) - 1) for key in keys]
