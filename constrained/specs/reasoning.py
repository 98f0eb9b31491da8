"""Reasoning in free text before a value."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from plait.constrained.specs.checks import MAX_TAG_BYTES, GrammarError, utf8_length
from plait.constrained.specs.structural import ControlTokens, Structural
from plait.constrained.specs.trigger import checked_control_tokens
from plait.constrained.specs.values import Choices, Ebnf, JsonObject, JsonSchema, Lark, Regex

MAX_REASONING_TOKENS = 1 << 24


ValueSpec: TypeAlias = Regex | Choices | JsonSchema | JsonObject | Lark | Ebnf | Structural


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """Reasoning in free text, then a text of the constraint `then`.

    The text is `begin`, any text up to and with `end`, `separator`, and the value. The model writes `end`; after
    `max_tokens` tokens of reasoning (None: any number) it is forced, behind `lead`. `control_tokens`: as in Structural.

    >>> Reasoning(Choices(("yes", "no")), max_tokens=64).end
    '</think>'
    """

    then: ValueSpec
    begin: str = "<think>"
    end: str = "</think>"
    separator: str = "\n\n"
    max_tokens: int | None = None
    lead: str = ""
    control_tokens: ControlTokens = ()

    def __post_init__(self) -> None:
        if isinstance(self.then, Reasoning) or not isinstance(self.then, msgspec.Struct):
            raise GrammarError("then must be a constraint on the value, without reasoning")
        msgspec.structs.force_setattr(self, "control_tokens", checked_control_tokens(self.control_tokens))
        for name in ("begin", "end", "separator", "lead"):
            if utf8_length(getattr(self, name), name, None) > MAX_TAG_BYTES:
                raise GrammarError(f"{name} is longer than {MAX_TAG_BYTES} bytes")
        if not self.end:
            raise GrammarError("end is empty, so the reasoning could not end")
        count = self.max_tokens
        if count is not None and (type(count) is not int or not 0 <= count <= MAX_REASONING_TOKENS):
            raise GrammarError(f"max_tokens must be a number from 0 to {MAX_REASONING_TOKENS}")
