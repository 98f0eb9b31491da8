"""The contract between a compiled constraint and whoever samples under it.

Knows: what may be asked of a grammar and of a place in it. Must not know: how any of them is compiled or
stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]


class Matcher(ABC):
    """One text on its way through a grammar. Belongs to one text and one thread; made by `Grammar.matcher()`.

    The text ends with an end token, taken by `accept` like any other. Afterwards the matcher is terminated:
    it allows end tokens only, each of which it accepts and stays terminated, so that rows that are stepped
    past their end need no special case.

    A matcher may give up in the middle of a text where following it on would cost too much: `accept`,
    `fill_mask`, `forced_bytes` and `is_accepting` then raise GrammarError, and that text must end there.
    Automata held as arrays never do.
    """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Append `token` to the text; False, and nothing changed, where it is not allowed here."""

    @abstractmethod
    def fill_mask(self, row: Int32Array) -> None:
        """Overwrite `row`, int32 [ceil(V/32)]: bit i%32 of word i//32 is set where token i is allowed here.

        End tokens are allowed where `is_accepting`. A grammar may leave out tokenizations that are not the
        tokenizer's own where the text is forced anyway; it never leaves out a text.
        """

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Take back the last `n` accepted tokens, end tokens included. ValueError where there are fewer."""

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """The bytes that every continuation begins with; b"" where none, or where the text may end."""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """Tokens that may be appended without sampling: `forced_bytes` as the tokenizer itself splits them.

        Those at the end that could be part of a longer token, going on into what is not forced, are held back.
        Each is allowed in turn by `accept`. Choosing one token at a time may spell the same text by others; see
        docs/constraints.md.
        """

    @abstractmethod
    def completion(self, limit: int) -> list[int] | None:
        """At most `limit` tokens after which the text is complete, the end token apart; None where not found.

        [] where it is complete already. Automata give the fewest tokens there are, and None means that there
        are no such few. Other grammars give a short way, walked and so known to be right; None then means that
        none was found. See docs/constraints.md for what to make of it.
        """

    @property
    @abstractmethod
    def is_accepting(self) -> bool:
        """The text is complete as it stands, though it may also go on."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """An end token was accepted."""


class Grammar(ABC):
    """A compiled constraint for one vocabulary: never changes, and may be shared by any number of texts.

    >>> matcher = grammar.matcher()                                       # doctest: +SKIP
    >>> row = np.zeros(mask_words(len(vocabulary)), np.int32)             # doctest: +SKIP
    >>> while not matcher.is_terminated:                                  # doctest: +SKIP
    ...     matcher.fill_mask(row)
    ...     matcher.accept(sample(logits, row))
    `unchecked` are the JSON pointers of what a lenient schema demands and the masks do not; `check` tells of a
    finished text whether it meets those demands too.
    """

    unchecked: tuple[str, ...] = ()

    def check(self, text: str) -> str | None:
        """Why the finished `text` is not valid, in one line; None where it is, or nothing was left unchecked."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory it may come to hold, masks included; what a cache charges for it."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """A matcher at the start of a text; costs microseconds."""


def mask_words(width: int) -> int:
    """The int32 words in a mask over `width` tokens.

    >>> mask_words(49152), mask_words(33)
    (1536, 2)
    """
    return (width + 31) // 32
