"""The forms of constraint (pattern, choices, JSON Schema, grammar, calls) as immutable values with their limits."""

from __future__ import annotations

from typing import TypeAlias

from plait.constrained.specs.call_contents import (
    CDATA_BEGIN,
    CDATA_END,
    NAME_PLACE,
    TYPE_PLACE,
    Elements,
    JsonString,
    Keywords,
    Notation,
    PythonForm,
)
from plait.constrained.specs.checks import CompileQueueFull, GrammarError, SchemaSource
from plait.constrained.specs.reasoning import MAX_REASONING_TOKENS, Reasoning, ValueSpec
from plait.constrained.specs.structural import ID_PLACE, MAX_NUMBERED, Structural
from plait.constrained.specs.trigger import Content, Trigger
from plait.constrained.specs.values import (
    MAX_CHOICES,
    MAX_CHOICES_BYTES,
    MAX_PATTERN_BYTES,
    Choices,
    Ebnf,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
)

__all__ = [
    "CDATA_BEGIN",
    "CDATA_END",
    "Choices",
    "CompileQueueFull",
    "Content",
    "Ebnf",
    "Elements",
    "GrammarError",
    "ID_PLACE",
    "JsonObject",
    "JsonSchema",
    "JsonString",
    "Keywords",
    "Lark",
    "MAX_CHOICES",
    "MAX_CHOICES_BYTES",
    "MAX_PATTERN_BYTES",
    "MAX_NUMBERED",
    "MAX_REASONING_TOKENS",
    "NAME_PLACE",
    "Notation",
    "PythonForm",
    "Reasoning",
    "Regex",
    "SchemaSource",
    "Spec",
    "Structural",
    "TYPE_PLACE",
    "Trigger",
    "ValueSpec",
    "kind_of",
]

Spec: TypeAlias = ValueSpec | Reasoning
"""Every form of constraint; `msgspec.msgpack.Decoder(Spec)` decodes one from the wire."""


def kind_of(spec: Spec) -> str:
    """Returns what a spec is called in an error text.

    >>> kind_of(JsonSchema(True)), kind_of(Lark('start: "a"'))
    ('JSON schema', 'grammar')
    """
    names = {Regex: "pattern", Choices: "list of choices", JsonSchema: "JSON schema", Structural: "structure of calls"}
    return names.get(type(spec), "grammar") if not isinstance(spec, Reasoning) else kind_of(spec.then)
