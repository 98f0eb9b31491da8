"""The interface of compiled constraints: `Grammar`, shared by all texts, and `Matcher`, the state of one text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]


class Matcher(ABC):
    """The state of one text under a grammar. Used by one thread; made by `Grammar.matcher()`.

    A text ends with an end token (EOS), which `accept` takes like any other token. The matcher is then terminated: it
    allows end tokens only and stays terminated, so a row that is stepped past its end needs no special case.

    A matcher may refuse to continue in the middle of a text because a step would cost too much: `accept`, `fill_mask`,
    `forced_bytes` and `is_accepting` then raise GrammarError, and the text must end there. Token automata never do
    this.
    """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Appends `token` to the text. Returns False and changes nothing if the token is not allowed here."""

    @abstractmethod
    def fill_mask(self, row: Int32Array) -> None:
        """Overwrites `row`, int32 [ceil(V/32)]: bit i%32 of word i//32 is set if token i is allowed here.

        End tokens are allowed where `is_accepting`. Where the text is forced, a grammar may leave out tokenizations
        that the tokenizer would not produce; it never leaves out a text.
        """

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Removes the last `n` accepted tokens, end tokens included. Raises ValueError if there are fewer."""

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """Returns the bytes that every continuation begins with; b"" if there are none or the text may end here."""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """Returns tokens that can be appended without sampling: `forced_bytes` as the tokenizer splits them.

        Tokens at the end that may turn out to be part of a longer token are left out. `accept` allows each token in
        turn. Sampling token by token may spell the same text with other tokens; see docs/constraints.md.
        """

    @abstractmethod
    def completion(self, limit: int) -> list[int] | None:
        """Returns at most `limit` tokens that complete the text, without the end token; None if none were found.

        Returns [] if the text is complete. A token automaton returns the fewest tokens possible, and None means that
        more than `limit` are needed. Other grammars return a short completion that was checked; None then means that
        the search found none. docs/constraints.md says how to use this.
        """

    @property
    @abstractmethod
    def is_accepting(self) -> bool:
        """Whether the text so far is complete; it may still continue."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether an end token was accepted."""

    @property
    def num_reasoning_tokens(self) -> int:
        """The accepted tokens before the value: reasoning with its marks. 0 without a `Reasoning` constraint."""
        return 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the value of a `Reasoning` constraint has not begun."""
        return False


class Grammar(ABC):
    """A compiled constraint for one vocabulary. Immutable; any number of texts can share it.

    >>> matcher = grammar.matcher()                                       # doctest: +SKIP
    >>> row = np.zeros(mask_words(len(vocabulary)), np.int32)             # doctest: +SKIP
    >>> while not matcher.is_terminated:                                  # doctest: +SKIP
    ...     matcher.fill_mask(row)
    ...     matcher.accept(sample(logits, row))

    `unchecked` lists the JSON pointers of schema keywords that a lenient grammar does not enforce by masks; `check`
    validates a finished text against them. `warnings`: a sentence for each `format` that is not known and therefore not
    enforced, and for each keyword of a schema because of which valid values cannot be generated.
    """

    unchecked: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def check(self, text: str) -> str | None:
        """Returns in one line why the finished `text` is invalid; None if it is valid or nothing was left unchecked."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The most bytes of memory that the grammar may use, cached masks included; what a cache charges for it."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """Returns a matcher at the start of a text; takes microseconds."""


def mask_words(width: int) -> int:
    """Returns the number of int32 words in a mask over `width` tokens.

    >>> mask_words(49152), mask_words(33)
    (1536, 2)
    """
    return (width + 31) // 32


def pack_mask(is_allowed: NDArray[np.bool_]) -> Int32Array:
    """Returns the mask of flags, one for each token: int32 [ceil(V/32)].

    >>> pack_mask(np.array([True, False, True]))
    array([5], dtype=int32)
    """
    bits = np.packbits(is_allowed, bitorder="little")
    if len(bits) % 4:
        bits = np.append(bits, np.zeros(-len(bits) % 4, np.uint8))
    return bits.view(np.int32)


def mask_of(tokens: Sequence[int] | NDArray[np.integer], width: int) -> Int32Array:
    """Returns the mask of some of `width` tokens.

    >>> mask_of([0, 2], 3)
    array([5], dtype=int32)
    """
    is_allowed = np.zeros(width, np.bool_)
    is_allowed[np.asarray(tokens, np.int64)] = True
    return pack_mask(is_allowed)


def set_bits(row: Int32Array, tokens: Sequence[int]) -> None:
    """Sets the bits of a few tokens in a mask; of many, `row |= mask_of(tokens, width)` takes less time."""
    words = row.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
