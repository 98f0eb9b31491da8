"""Writes a rewritten schema with objects of hundreds of optional properties as a Lark grammar.

llguidance writes the optional properties of an object as a chain in which each one follows the rest of the others: it
compiles in quadratic time (5,000: 3.5 s), and every name adds four items to the state of the parser. Here they are a
tree of `ARITY` branches instead, which compiles in linear time (0.5 s) with 1.3 items for each name. Only the wide
objects, and the schemas around them, are written so; any other schema in them stays a JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.constrained.json_schema.rewrite.document import Schema, subschemas

WIDE_FROM = 300  # optional properties; llguidance alone follows up to 500
ARITY = 4
MAX_CHARS = 4 << 20  # of a grammar
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties"))
_OF_ARRAYS = frozenset(("type", "items", "minItems", "maxItems"))
_PREFIX = "#/$defs/"
_STRING_BYTE = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'  # as llguidance writes the characters of a name


class _NotWritten(Exception):
    """Raised for a schema around a wide object that has no Lark form here; llguidance takes it as a whole."""


def write_wide_objects(
    schema: dict[str, Any],
    with_options: Callable[[dict[str, Any]], dict[str, Any]],
    separators: tuple[str, str],
    wide_from: int = WIDE_FROM,
) -> str | None:
    """Returns the Lark grammar of a rewritten schema, or None if it has no wide object or cannot be written so.

    with_options: adds llguidance's options to a schema that stays JSON. separators: the texts between the items of an
    array or an object, and behind a name. wide_from: the number of optional properties from which an object is wide.

    >>> write_wide_objects({"type": "object", "properties": {"a": {}}}, lambda schema: schema, (",", ":"))
    """
    definitions = schema.get("$defs", {})
    root = {name: value for name, value in schema.items() if name != "$defs"}
    wide = [name for name, body in definitions.items() if _has_wide_object(body, wide_from)]
    if not wide and not _has_wide_object(root, wide_from):
        return None
    try:
        return _Writer(definitions, with_options, separators, wide_from).grammar(root)
    except _NotWritten:
        return None


def _has_wide_object(schema: Schema, wide_from: int) -> bool:
    """Returns whether an object in a schema, references not followed, has `wide_from` optional properties."""
    return any(
        len(part.get("properties", ())) - len(part.get("required", ())) >= wide_from
        for _, part in subschemas(schema, "")
    )


def _references(schema: Schema) -> set[str]:
    """Returns the names of the definitions to which a schema refers itself."""
    return {str(part["$ref"]).removeprefix(_PREFIX) for _, part in subschemas(schema, "") if "$ref" in part}


@dataclass(frozen=True)
class _Member:
    """One place in the sequence of an object's members: its Lark expression, and whether it must occur."""

    expression: str
    is_required: bool


class _Writer:
    def __init__(
        self,
        definitions: dict[str, Schema],
        with_options: Callable[[dict[str, Any]], dict[str, Any]],
        separators: tuple[str, str],
        wide_from: int,
    ) -> None:
        self._definitions, self._with_options, self._wide_from = definitions, with_options, wide_from
        self._separator, self._colon = _text(separators[0]), separators[1]
        self._rules: list[str] = []
        self._num_chars = 0
        self._leaves: dict[str, str] = {}  # the JSON text of a schema -> its rule
        self._names: dict[str, str] = {}  # the name of a definition -> its rule
        self._references = {name: _references(body) for name, body in definitions.items()}
        self._leading = {name for name, body in definitions.items() if _has_wide_object(body, wide_from)}
        while more := {n for n, found in self._references.items() if n not in self._leading and found & self._leading}:
            self._leading |= more

    def grammar(self, root: Schema) -> str:
        self._rules.insert(0, f"start: {self._schema(root)}")
        return "\n".join(self._rules)

    def _rule(self, body: str, prefix: str = "r") -> str:
        """Adds a rule, or a terminal for an upper-case prefix, and returns its name."""
        name = f"{prefix}{len(self._rules)}"
        self._num_chars += len(body)
        if self._num_chars > MAX_CHARS:
            raise _NotWritten
        self._rules.append(f"{name}: {body}")
        return name

    def _leads_to_wide(self, schema: Schema) -> bool:
        return _has_wide_object(schema, self._wide_from) or not self._leading.isdisjoint(_references(schema))

    def _schema(self, schema: Schema) -> str:
        """Returns the Lark expression of a schema."""
        if isinstance(schema, bool) or not self._leads_to_wide(schema):
            return self._leaf(schema)
        if schema.keys() == {"$ref"}:
            return self._definition(schema["$ref"].removeprefix(_PREFIX))
        if schema.keys() == {"anyOf"}:
            return self._rule(" | ".join(map(self._schema, schema["anyOf"])))
        if schema.keys() == {"allOf"} and len(schema["allOf"]) == 1:
            return self._schema(schema["allOf"][0])
        if schema.get("type") in ("array", ["array"]) and schema.keys() <= _OF_ARRAYS:
            return self._array(schema)
        return self._object(schema)

    def _definition(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = rule = f"d{len(self._names)}"
            body = self._schema(self._definitions[name])
            self._rules.append(f"{rule}: {body}")
        return self._names[name]

    def _leaf(self, schema: Schema) -> str:
        if schema is False:
            raise _NotWritten
        body: dict[str, Any] = {} if schema is True else schema
        key = json.dumps(body, ensure_ascii=False)
        if key not in self._leaves:
            needed, todo = dict[str, Schema](), _references(body)
            while todo:
                name = todo.pop()
                needed[name] = self._definitions[name]
                todo |= self._references[name] - needed.keys()
            whole = {**body, "$defs": needed} if needed else body
            self._leaves[key] = self._rule(f"%json {json.dumps(self._with_options(whole))}", "v")
        return self._leaves[key]

    def _array(self, schema: dict[str, Any]) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high is not None and high < max(low, 1):
            raise _NotWritten
        item = self._schema(schema.get("items", True))
        more = f"({self._separator} {item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        items = item if high == 1 else f"{item} {more}"
        return self._rule(f'"[" {items} "]"' + (' | "[" "]"' if low == 0 else ""))

    def _object(self, schema: dict[str, Any]) -> str:
        types = schema.get("type", _TYPES)
        others = [name for name in ([types] if isinstance(types, str) else types) if name != "object"]
        rest = {name: value for name, value in schema.items() if name not in _OF_OBJECTS and name != "type"}
        if len(others) == len([types] if isinstance(types, str) else types) or (rest and not others):
            raise _NotWritten
        if not rest.keys().isdisjoint(("$ref", "anyOf", "allOf", "enum", "patternProperties")) or any(
            name.endswith("Properties") for name in rest
        ):
            raise _NotWritten
        members = self._members(schema)
        body = f'"{{" {self._sequence(members)} "}}"' if members else '"{" "}"'
        if members and not any(member.is_required for member in members):
            body += ' | "{" "}"'
        if others:
            body += f" | {self._schema({**rest, 'type': others})}"
        return self._rule(body)

    def _members(self, schema: dict[str, Any]) -> list[_Member]:
        """Returns the members of an object in order: those listed, those only required, and any others."""
        listed, required = schema.get("properties", {}), dict.fromkeys(schema.get("required", ()))
        additional = schema.get("additionalProperties", True)
        named = {**listed, **{name: additional for name in required if name not in listed}}
        members = []
        for name, inner in named.items():
            if inner is not False:
                members.append(_Member(f"{self._name(name)} {self._schema(inner)}", name in required))
            elif name in required:
                raise _NotWritten
        if additional is not False:
            member = f"{self._additional_name(list(named))} {self._schema(additional)}"
            members.append(_Member(self._rule(f"{member} ({self._separator} {member})*"), False))
        return members

    def _name(self, name: str) -> str:
        return _text(json.dumps(name, ensure_ascii=False) + self._colon)

    def _additional_name(self, names: list[str]) -> str:
        """Returns the terminal of the names that are not listed, each in its only spelling."""
        listed = "|".join(_regex_literal(json.dumps(name, ensure_ascii=False)) for name in names)
        colon = _regex_literal(self._colon)
        return self._rule(f'/"{_STRING_BYTE}*"{colon}/ & ~/({listed}){colon}/', "N")

    def _sequence(self, members: list[_Member]) -> str:
        """Returns the expression of a nonempty subsequence of `members` that has all the required ones."""
        while len(members) > 1:
            members = [self._group(members[at : at + ARITY]) for at in range(0, len(members), ARITY)]
        return members[0].expression

    def _group(self, members: list[_Member]) -> _Member:
        """Returns the nonempty subsequences of a few members as one member."""
        behind = ""  # the expression of what may follow the member: nothing, or a separator and some of the later ones
        options: list[str] = []  # the expressions of the nonempty subsequences of the later ones, by their first member
        is_required = False
        for member in reversed(members):
            option = f"{member.expression} {behind}".rstrip()
            options = [option] if member.is_required else [option, *options]
            is_required = is_required or member.is_required
            sequence = self._rule(" | ".join(options))
            behind = self._rule(f"{self._separator} {sequence}" + ("" if is_required else ' | ""'))
        return _Member(sequence, is_required)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex_literal(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)
