"""Why a constraint cannot be used, and the checks that several forms of constraint share, with their limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec


class GrammarError(ValueError):
    """Raised for a constraint that cannot be used. `reason` says why, `where` says at which place (None: unknown).

    `where` is a character index into a pattern, the index of an item, or the JSON pointer of a keyword (RFC 6901, ""
    for the whole schema).

    >>> GrammarError("unterminated character set", where=3).where
    3
    """

    def __init__(self, reason: str, where: int | str | None = None) -> None:
        super().__init__(f"{reason} (at {where})" if where or where == 0 else reason)
        self.reason = reason
        self.where = where


class CompileQueueFull(GrammarError):
    """Raised for a constraint that was not compiled, because too many others wait, no compiler process started, or
    the machine was too busy to compile it in time.

    It may be valid; try again later.
    """


MAX_SCHEMA_BYTES = 1 << 20
MAX_SCHEMAS = 1024
MAX_GRAMMAR_BYTES = 256 << 10
MAX_TAG_BYTES = 1024


if TYPE_CHECKING:
    SchemaSource: TypeAlias = str | dict[str, Any] | bool | type
    SchemaMap: TypeAlias = str | Mapping[str, SchemaSource]
else:
    SchemaSource = SchemaMap = str  # what `__post_init__` stores and messages carry


def utf8_length(text: object, what: str, where: int | None) -> int:
    """Returns the number of bytes of a text. Raises GrammarError if it is none, or has no UTF-8."""
    if not isinstance(text, str):
        raise GrammarError(f"{what} must be a text, not {type(text).__name__}", where)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        place = error.start if where is None else where
        raise GrammarError(f"{what} contains a lone surrogate", place) from None


def check_style(whitespace: bool, compact: bool) -> None:
    """Raises GrammarError for a style of JSON that contradicts itself."""
    if whitespace and compact:
        raise GrammarError("whitespace and compact contradict each other")


def check_grammar(grammar: object) -> None:
    """Raises GrammarError for a grammar that is too long, or no text."""
    if utf8_length(grammar, "the grammar", None) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")


def schema_text(schema: object) -> str:
    """Returns the JSON text of a schema given as text, dict, bool or Pydantic model."""
    model_schema = getattr(schema, "model_json_schema", None)
    if isinstance(schema, type) and callable(model_schema):
        schema = model_schema()
    if isinstance(schema, dict | bool):
        try:
            if len(text := msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:  # found faster than json.dumps writes it
                schema = text.decode()
            else:
                schema = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise GrammarError(f"the schema is not JSON: {reason}") from None
    if not isinstance(schema, str):
        name = type(schema).__name__
        raise GrammarError(f"a schema is a dict, a bool, its JSON text or a Pydantic model, not {name}")
    if utf8_length(schema, "the schema", None) > MAX_SCHEMA_BYTES:
        raise GrammarError(f"the schema is longer than {MAX_SCHEMA_BYTES} bytes")
    return schema


def schemas_text(schemas: object, schema: str) -> str:
    """Returns the JSON text of documents by URI, given as text or mapping; "" for none.

    Raises GrammarError for more than 1,024, and for more than 1 MiB of them and `schema` together.
    """
    if isinstance(schemas, Mapping):
        if not all(isinstance(uri, str) and uri for uri in schemas):
            raise GrammarError("schemas maps URIs, which are texts, to schemas")
        if len(schemas) > MAX_SCHEMAS:
            raise GrammarError(f"there are more than {MAX_SCHEMAS} schemas")
        items = (f"{json.dumps(uri)}:{schema_text(schemas[uri])}" for uri in sorted(schemas))
        schemas = f"{{{','.join(items)}}}" if schemas else ""
    if utf8_length(schemas, "schemas", None) and len(f"{schema}{schemas}".encode()) > MAX_SCHEMA_BYTES:
        raise GrammarError(f"the schema and its schemas are longer than {MAX_SCHEMA_BYTES} bytes together")
    return str(schemas)


def check_tags(spec: object, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Raises GrammarError if one of these fields of a spec is too long, or a required one is empty."""
    for name in (*required, *optional):
        if not int(name in required) <= utf8_length(getattr(spec, name), name, None) <= MAX_TAG_BYTES:
            raise GrammarError(f"{name} must have {int(name in required)} to {MAX_TAG_BYTES} bytes")
