"""Reasoning in free text before a value."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from plait.constrained.specs.checks import MAX_TAG_BYTES, utf8_length
from plait.constrained.specs.errors import GrammarError
from plait.constrained.specs.structural import Structural
from plait.constrained.specs.values import Choices, Ebnf, JsonObject, JsonSchema, Lark, Regex

MAX_REASONING_TOKENS = 1 << 24


ValueSpec: TypeAlias = Regex | Choices | JsonSchema | JsonObject | Lark | Ebnf | Structural


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """Reasoning in free text, then a text of the constraint `then`.

    The text is `begin`, any text up to and with `end`, `separator`, and the value. The model writes `end`, which must
    be ordinary text of the vocabulary; after `max_tokens` tokens of reasoning (None: any number) it is forced.

    >>> Reasoning(Choices(("yes", "no")), max_tokens=64).end
    '</think>'
    """

    then: ValueSpec
    begin: str = "<think>"
    end: str = "</think>"
    separator: str = "\n\n"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.then, Reasoning) or not isinstance(self.then, msgspec.Struct):
            raise GrammarError("then must be a constraint on the value, without reasoning")
        for name in ("begin", "end", "separator"):
            if utf8_length(getattr(self, name), name, None) > MAX_TAG_BYTES:
                raise GrammarError(f"{name} is longer than {MAX_TAG_BYTES} bytes")
        if not self.end:
            raise GrammarError("end is empty, so the reasoning could not end")
        count = self.max_tokens
        if count is not None and (type(count) is not int or not 0 <= count <= MAX_REASONING_TOKENS):
            raise GrammarError(f"max_tokens must be a number from 0 to {MAX_REASONING_TOKENS}")
