"""What a constraint says: a pattern, or a list of texts, as values that travel between processes.

Knows: the shape and the limits of a specification. Must not know: vocabularies, automata, or how it is
compiled.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

MAX_PATTERN_BYTES = 64 << 10
MAX_CHOICES = 10_000
MAX_CHOICES_BYTES = 1 << 20


class GrammarError(ValueError):
    """A constraint that cannot be used: `reason`, and `where` in it (None where no place is to blame).

    `where` is an index of characters into a pattern, or the index of an item.

    >>> GrammarError("unterminated character set", where=3).where
    3
    """

    def __init__(self, reason: str, where: int | None = None) -> None:
        super().__init__(reason if where is None else f"{reason} (at {where})")
        self.reason = reason
        self.where = where


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The texts that `re.fullmatch(pattern, text)` matches, in Python's own syntax and meaning.

    At most 64 KiB of UTF-8; anything else raises GrammarError (a msgspec.ValidationError while decoding).

    >>> Regex(r"[0-9]{4}-[0-9]{2}").pattern
    '[0-9]{4}-[0-9]{2}'
    """

    pattern: str

    def __post_init__(self) -> None:
        if _utf8_length(self.pattern, "the pattern", None) > MAX_PATTERN_BYTES:
            raise GrammarError(f"the pattern is longer than {MAX_PATTERN_BYTES} bytes")


class Choices(msgspec.Struct, frozen=True, tag="choices"):
    """Exactly one of these texts: 1 to 10,000 of them, none empty, none twice, at most 1 MiB of UTF-8.

    Anything else raises GrammarError with the item's index (a msgspec.ValidationError while decoding).

    >>> Choices(("yes", "no")).choices
    ('yes', 'no')
    """

    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.choices, tuple):
            raise GrammarError(f"choices must be a tuple of texts, not {type(self.choices).__name__}")
        if not 1 <= len(self.choices) <= MAX_CHOICES:
            raise GrammarError(f"there must be 1 to {MAX_CHOICES} choices, not {len(self.choices)}")
        total, seen = 0, set[str]()
        for index, choice in enumerate(self.choices):
            total += _utf8_length(choice, "a choice", index)
            if not choice:
                raise GrammarError("a choice is empty", index)
            if choice in seen:
                raise GrammarError("a choice is given twice", index)
            if total > MAX_CHOICES_BYTES:
                raise GrammarError(f"the choices are longer than {MAX_CHOICES_BYTES} bytes together", index)
            seen.add(choice)


Spec: TypeAlias = Regex | Choices
"""Every form of constraint; `msgspec.msgpack.Decoder(Spec)` decodes one from the wire."""


def _utf8_length(text: object, what: str, where: int | None) -> int:
    if not isinstance(text, str):
        raise GrammarError(f"{what} must be a text, not {type(text).__name__}", where)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        place = error.start if where is None else where
        raise GrammarError(f"{what} holds a lone surrogate", place) from None
