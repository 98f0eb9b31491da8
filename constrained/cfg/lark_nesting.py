"""Grammars and schemas within a Lark grammar: `%json {...}` and `%lark {...}` become references to rules of their own.

A reference has the length of what it replaces, so that places in the written out grammar are places in the given one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from plait.constrained.json_schema.schema_compiler import json_rules
from plait.constrained.specs import GrammarError, JsonSchema

MAX_NESTED = 4  # grammars within one another
_NOT_ALONE = "uniqueItems, and minProperties of two or more names that are not listed, are"
_PIECE = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|%(?P<kind>json|lark)\s*(?=\{)|(?P<open>\{)|(?P<shut>\})'
    r"|(?P<rest>%(?:json|lark)\b)"
)
_DEFINED = re.compile(r"(?m)^[ \t]*[?!]?([A-Za-z_]\w*)[ \t]*(?:\[[^\]\n]*\])?[ \t]*:")


@dataclass(frozen=True)
class Nested:
    """What stands in braces from `start` (the `%`) to `end`: a grammar or a schema; `body` is where its text begins."""

    kind: str
    start: int
    body: int
    end: int


@dataclass(frozen=True)
class FlatLark:
    """A grammar without nested ones.

    text: as given, with a name in the place of each nested one. rules: the rules of these names. inner: the nested
    grammars, each with the index where it begins. warnings: of the schemas.
    """

    text: str
    rules: tuple[str, ...] = ()
    inner: tuple[tuple[int, FlatLark], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def lark(self) -> str:
        """The whole grammar in llguidance's notation."""
        return "\n".join((self.text, *self.rules)) if self.rules else self.text


def flatten(grammar: str, depth: int = 0) -> FlatLark:
    """Returns a grammar with its nested grammars and schemas apart. Raises GrammarError with an index.

    >>> flatten('start: "a" %json {"type": "null"}').text
    'start: "a" j0                     '
    """
    blocks = list(_nested(grammar))
    if not blocks:
        return FlatLark(grammar)
    if depth >= MAX_NESTED:
        raise GrammarError(f"grammars nest more than {MAX_NESTED} deep", blocks[0].start)
    prefixes = (f"j{number}" for number in count() if not re.search(rf"(?i)\bj{number}", grammar))
    text, rules, inner, warnings = grammar, list[str](), list[tuple[int, FlatLark]](), list[str]()
    for block in blocks:
        heads = _DEFINED.findall(text, 0, block.start)
        if heads and heads[-1].lstrip("_")[:1].isupper():
            raise GrammarError(f"%{block.kind} cannot be part of a terminal, only of a rule", block.start)
        name = next(prefixes)
        if block.kind == "json":
            found = _schema_rules(grammar, block, name)
            rules += found[0]
            warnings += found[1]
        else:
            try:
                flat = flatten(grammar[block.body : block.end - 1], depth + 1)
            except GrammarError as error:
                raise moved(error, block.body) from None
            inner.append((block.body, flat))
            rules += [f"{name}: %lark {{", flat.lark, "}"]
            warnings += flat.warnings
        text = text[: block.start] + name.ljust(block.end - block.start) + text[block.end :]
    return FlatLark(text, tuple(rules), tuple(inner), tuple(dict.fromkeys(warnings)))


def moved(error: GrammarError, offset: int) -> GrammarError:
    """Returns an error of a nested grammar with its place in the whole one."""
    return GrammarError(error.reason, error.where + offset if isinstance(error.where, int) else offset)


def _nested(grammar: str) -> Iterator[Nested]:
    at = 0
    while (piece := _PIECE.search(grammar, at)) is not None:
        at = piece.end()
        if piece["rest"] is not None:
            raise GrammarError(f"behind {piece['rest']} stands a grammar or schema in braces", piece.start())
        if piece["kind"] is None:
            continue
        start, brace = piece.start(), piece.end()
        if piece["kind"] == "json":
            try:
                _, at = json.JSONDecoder().raw_decode(grammar, brace)
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
                raise GrammarError(f"this schema is no JSON: {reason}", brace) from None
        else:
            at = _closing(grammar, brace)
        yield Nested(piece["kind"], start, brace + (piece["kind"] == "lark"), at)


def _closing(grammar: str, brace: int) -> int:
    """Returns the index behind the brace that closes the one at `brace`."""
    depth, at = 0, brace
    while (piece := _PIECE.search(grammar, at)) is not None:
        at = piece.end()
        depth += (piece["open"] is not None) - (piece["shut"] is not None)
        if depth == 0 and piece["shut"] is not None:
            return at
    raise GrammarError("this grammar is not closed", brace)


def _schema_rules(grammar: str, block: Nested, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the rules of a schema, the first of which is `name`, and its warnings."""
    try:
        found = json_rules(JsonSchema(grammar[block.body : block.end]), name)
    except GrammarError as error:
        place = f" (at {error.where})" if error.where else ""
        raise GrammarError(f"in this schema: {error.reason}{place}", block.start) from None
    if found.unique:
        raise GrammarError(f"in this schema: {_NOT_ALONE} not supported within a grammar", block.start)
    return found.rules, found.warnings
