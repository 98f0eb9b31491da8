"""Constraints on a whole value: pattern, choices, JSON Schema and grammar."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.constrained.specs.checks import (
    GrammarError,
    SchemaMap,
    SchemaSource,
    check_grammar,
    check_style,
    schema_text,
    schemas_text,
    utf8_length,
)

MAX_PATTERN_BYTES = 64 << 10
MAX_CHOICES = 10_000
MAX_CHOICES_BYTES = 1 << 20


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The texts that `re.fullmatch(pattern, text)` matches, with Python's syntax and meaning.

    At most 64 KiB of UTF-8; anything else raises GrammarError (a msgspec.ValidationError while decoding).

    >>> Regex(r"[0-9]{4}-[0-9]{2}").pattern
    '[0-9]{4}-[0-9]{2}'
    """

    pattern: str

    def __post_init__(self) -> None:
        if utf8_length(self.pattern, "the pattern", None) > MAX_PATTERN_BYTES:
            raise GrammarError(f"the pattern is longer than {MAX_PATTERN_BYTES} bytes")


class Choices(msgspec.Struct, frozen=True, tag="choices"):
    """Exactly one of the given texts: 1 to 10,000 distinct, non-empty texts, at most 1 MiB of UTF-8.

    A list is accepted as well as a tuple. Anything else raises GrammarError with the item's index (a
    msgspec.ValidationError while decoding).

    >>> Choices(("yes", "no")).choices
    ('yes', 'no')
    """

    choices: Annotated[tuple[str, ...], Meta(max_length=MAX_CHOICES)]

    def __post_init__(self) -> None:
        if isinstance(self.choices, list):
            msgspec.structs.force_setattr(self, "choices", tuple(self.choices))
        if not isinstance(self.choices, tuple):
            raise GrammarError(f"choices must be a tuple of texts, not {type(self.choices).__name__}")
        if not 1 <= len(self.choices) <= MAX_CHOICES:
            raise GrammarError(f"there must be 1 to {MAX_CHOICES} choices, not {len(self.choices)}")
        total, seen = 0, set[str]()
        for index, choice in enumerate(self.choices):
            total += utf8_length(choice, "a choice", index)
            if not choice:
                raise GrammarError("a choice is empty", index)
            if choice in seen:
                raise GrammarError("a choice is given twice", index)
            if total > MAX_CHOICES_BYTES:
                raise GrammarError(f"the choices are longer than {MAX_CHOICES_BYTES} bytes together", index)
            seen.add(choice)


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """A JSON value that matches `schema`: a JSON text, a dict, or a Pydantic model class; at most 1 MiB.

    One space follows each comma and colon, as json.dumps writes it and as in most JSON that models were trained on.
    `compact` leaves it out; `whitespace` allows JSON white space between any two tokens. `annotations` treats all
    unknown keywords as annotations, as the specification does; without it probable misspellings are refused. An unknown
    `format` is an annotation, listed in `Grammar.warnings`; with `strict_formats` it is refused. `lenient` drops
    unsupported keywords, lists them in `Grammar.unchecked`, and leaves their validation to `Grammar.check`. `schemas`:
    the other documents that `$ref` may name, by their URI, or by one relative to the `$id` of `schema`; nothing is
    fetched. At most 1,024, and 1 MiB with `schema`. Anything else raises GrammarError.

    >>> JsonSchema({"type": "integer"}).text
    '{"type":"integer"}'
    """

    schema: SchemaSource
    whitespace: bool = False
    lenient: bool = False
    annotations: bool = False
    compact: bool = False
    strict_formats: bool = False
    schemas: SchemaMap = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "schema", schema_text(self.schema))
        msgspec.structs.force_setattr(self, "schemas", schemas_text(self.schemas, self.text))
        for name in ("whitespace", "lenient", "annotations", "compact", "strict_formats"):
            if not isinstance(getattr(self, name), bool):
                raise GrammarError(f"{name} must be True or False")
        check_style(self.whitespace, self.compact)

    @property
    def text(self) -> str:
        """The schema as JSON text."""
        return str(self.schema)


class JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    """Any JSON object, or any JSON value with `any_value`. `whitespace` and `compact` as in JsonSchema.

    >>> JsonObject().any_value
    False
    """

    any_value: bool = False
    whitespace: bool = False
    compact: bool = False

    def __post_init__(self) -> None:
        check_style(self.whitespace, self.compact)


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """The texts of a context-free grammar in Lark's notation, starting from its rule `start`; at most 256 KiB.

    >>> Lark('start: "yes" | "no"').grammar
    'start: "yes" | "no"'
    """

    grammar: str

    def __post_init__(self) -> None:
        check_grammar(self.grammar)


class Ebnf(msgspec.Struct, frozen=True, tag="ebnf"):
    """The texts of a context-free grammar in GBNF (llama.cpp), starting from its rule `root`; at most 256 KiB.

    >>> Ebnf('root ::= "yes" | "no"').grammar
    'root ::= "yes" | "no"'
    """

    grammar: str

    def __post_init__(self) -> None:
        check_grammar(self.grammar)
