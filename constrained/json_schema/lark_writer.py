"""Writes a rewritten schema as Lark rules where llguidance's JSON Schema does not do: bounded numbers, wide objects.

Numbers between bounds are terminals with a pattern of our own, and the members of an object a tree (lark_sequences.py).
Only objects of hundreds of optional properties, bounded numbers, and the schemas around them are written so; any other
schema in them stays a JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from llguidance import regex_to_lark

from plait.constrained.json_schema.emptiness import OF_NUMBERS, kinds_of, property_schema
from plait.constrained.json_schema.lark_scalars import (
    OF_SCALARS,
    PLAIN_BYTE,
    STRING_BYTE,
    has_own_pattern,
    is_beyond_llguidance,
    is_bounded_number,
    listed_within_bounds,
    number_terminal,
    quoted,
    regex_literal,
    simple_terminal,
)
from plait.constrained.json_schema.lark_sequences import Member, Sequences, within_counts
from plait.constrained.json_schema.number_patterns import multiples_of
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.rewrite.numbers import (
    BOUNDS,
    common_multiple,
    decimal_of,
    multiples_within,
    needs_pattern,
    number_range,
)
from plait.constrained.json_schema.subschemas import parts_of
from plait.constrained.json_schema.value_syntax import JSON, ValueSyntax

WIDE_FROM = 300  # optional properties; llguidance alone follows up to 500
MAX_CHARS = 4 << 20  # of a grammar
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")
_PREFIX = "#/$defs/"
_ANY = ""  # the name of the rule of any value of Python
_SPACE = r"SPACE: /[\x20\x0A\x0D\x09]+/"
_LITERALS = frozenset(("null", "boolean"))
_ZEROS = r"/\.0+/"  # behind an integer


class NotWritten(Exception):
    """Raised for a schema around a wide object or a bounded number that has no Lark form here, or no value."""

    def __init__(self, reason: str = "its numbers or listed texts have no form beside its other keywords") -> None:
        super().__init__(reason)


def write_lark(
    schema: dict[str, Any],
    with_options: Callable[[dict[str, Any]], str],
    separators: tuple[str, str],
    *,
    has_space: bool = False,
    syntax: ValueSyntax | None = None,
) -> list[str] | None:
    """Returns the rules of a Lark grammar of a rewritten schema, or None if it needs none.

    with_options: returns a schema that stays JSON, with llguidance's options, as a text. separators: the texts between
    the items of an array or an object, and behind a name. has_space: white space may stand around separators and within
    brackets. syntax: of all values, if it is not that of JSON. Raises NotWritten.

    Each bracket, name, separator and scalar is a lexeme of its own, as in llguidance's JSON Schema: its lexer follows
    only the longest lexeme, so alternatives that begin alike, some of them JSON schemas, must be divided alike.

    >>> write_lark({"type": "object", "properties": {"a": {}}}, json.dumps, (",", ":"))
    """
    writer = _Writer(schema, with_options, separators, has_space, syntax)
    return writer.rules() if writer.is_needed or syntax else None


class _Writer:
    def __init__(
        self,
        schema: dict[str, Any],
        with_options: Callable[[dict[str, Any]], str],
        separators: tuple[str, str],
        has_space: bool,
        syntax: ValueSyntax | None,
    ) -> None:
        self._definitions: dict[str, Schema] = schema.get("$defs", {})
        self._root: Schema = {name: value for name, value in schema.items() if name != "$defs"}
        self._with_options, self._syntax = with_options, syntax
        self._gap = " SPACE? " if has_space else ""
        self._separator, self._colon = (f"{self._gap}{quoted(text)}{self._gap}" for text in separators)
        self._sequences = Sequences(self._separator, self._rule)
        self._rules = [_SPACE] if has_space else []
        self._num_chars = 0
        self._written: dict[str, str] = {}  # the body of a terminal, or the JSON text of a schema -> its rule
        self._numbers: dict[str, str | None] = {}  # the text of a schema of bounded numbers -> its expression
        self._names: dict[str, str] = {}  # the name of a definition -> its rule
        self._needing: set[int] = set()  # the ids of the schemas that must be written
        self._references: dict[str, set[str]] = {}  # the name of a definition -> those to which it refers itself
        self._leading: set[str] = set()  # the definitions that lead to a schema that must be written
        self._follow_references()

    def _follow_references(self) -> None:
        for name, body in (*self._definitions.items(), ("", self._root)):
            found = list(parts_of(body))
            needing = [part for part in found if self._is_wide(part) or has_own_pattern(part)]
            self._needing |= {id(part) for part in needing}
            self._references[name] = {part["$ref"].removeprefix(_PREFIX) for part in found if "$ref" in part}
            self._leading |= {name} if needing else set()
        while more := {n for n, found in self._references.items() if n not in self._leading and found & self._leading}:
            self._leading |= more

    @property
    def is_needed(self) -> bool:
        return "" in self._leading

    def rules(self) -> list[str]:
        root = self._schema(self._root)
        if root is None:
            raise NotWritten("no value matches this schema")
        return [f"start: {root}", *self._rules]

    def _is_wide(self, schema: dict[str, Any]) -> bool:
        return len(schema.get("properties", ())) - len(schema.get("required", ())) >= WIDE_FROM

    def _leads(self, schema: Schema) -> bool:
        """Returns whether a schema, or one to which it leads, must be written."""
        if self._syntax is not None:
            return not self._syntax.is_json(schema)
        return any(
            id(part) in self._needing or ("$ref" in part and part["$ref"].removeprefix(_PREFIX) in self._leading)
            for part in parts_of(schema)
        )

    def _rule(self, body: str, prefix: str = "r") -> str:
        """Adds a rule, or a terminal for an upper-case prefix, and returns its name."""
        name = f"{prefix}{len(self._rules)}"
        self._num_chars += len(body)
        if self._num_chars > MAX_CHARS:
            raise NotWritten
        self._rules.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        if body not in self._written:
            self._written[body] = self._rule(body, "T")
        return self._written[body]

    def _schema(self, schema: Schema) -> str | None:
        """Returns the Lark expression of a schema, or None if it is found that no value matches it."""
        if schema is False:
            return None
        if isinstance(schema, dict) and is_bounded_number(schema):
            key = repr(schema)
            if key not in self._numbers:
                self._numbers[key] = self._number([schema], kinds_of([schema])[0])
            return self._numbers[key]
        if self._syntax is not None and (schema is True or schema == {}):
            return self._definition(_ANY)
        if schema is True or not self._leads(schema):
            return self._leaf(schema)
        if schema.keys() == {"$ref"}:
            return self._definition(schema["$ref"].removeprefix(_PREFIX))
        if schema.keys() == {"anyOf"}:
            return self._any_of(schema["anyOf"])
        if schema.keys() == {"allOf"} and len(schema["allOf"]) == 1:
            return self._schema(schema["allOf"][0])
        if not schema.keys().isdisjoint(("$ref", "anyOf")):
            raise NotWritten
        if any(not isinstance(part, dict) or not part.keys() <= OF_SCALARS for part in schema.get("allOf", ())):
            raise NotWritten
        return self._by_kind(schema)

    def _definition(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = rule = f"d{len(self._names)}"
            body = self._by_kind({}) if name == _ANY else self._schema(self._definitions[name])
            if body is None:
                raise NotWritten
            self._rules.append(f"{rule}: {body}")
        return self._names[name]

    def _any_of(self, branches: list[Schema]) -> str | None:
        others = [branch for branch in branches if not self._leads(branch)]
        options = [self._schema(branch) for branch in branches if self._leads(branch)]
        if others:
            options.append(self._leaf({"anyOf": others} if len(others) > 1 else others[0]))
        return self._choice(options)

    def _choice(self, options: list[str | None]) -> str | None:
        found = [option for option in options if option is not None]
        return self._rule(" | ".join(found)) if len(found) > 1 else found[0] if found else None

    def _by_kind(self, schema: dict[str, Any]) -> str | None:
        """Returns the expression of a schema without references and alternatives: one option for each type."""
        parts, rest = [schema, *schema.get("allOf", ())], kinds_of([schema])
        options: list[str | None] = []
        if any("enum" in part for part in parts):
            listed = listed_within_bounds(schema, parts)
            is_json = self._syntax is None and not (isinstance(listed, dict) and is_beyond_llguidance(listed))
            return self._leaf(listed) if is_json else self._literals(listed, self._syntax or JSON)
        number = next((kind for kind in rest if kind in ("number", *OF_NUMBERS)), None)
        is_fraction = number == "fraction"
        if number and (is_fraction or any(needs_pattern(part, is_integer=number == "integer") for part in parts)):
            options.append(self._number(parts, number))
            rest.remove(number)
        for kind, names, write in (("object", _OF_OBJECTS, self._object), ("array", _OF_ARRAYS, self._array)):
            about = {name: schema[name] for name in names if name in schema}
            if kind in rest and (self._syntax or self._is_wide(schema) or self._leads(about)):
                options.append(write(about))
                rest.remove(kind)
        if self._syntax is not None:
            options += self._kind_options(self._syntax, parts, rest)
            rest = [kind for kind in rest if kind in self._syntax.kinds_as_json]
        if rest:
            left = {k: v for k, v in schema.items() if not (k in _OF_OBJECTS and "object" not in rest)}
            left = {k: v for k, v in left.items() if not (k in _OF_ARRAYS and "array" not in rest)}
            left = {k: v for k, v in left.items() if not (k in BOUNDS and number not in rest)}
            options.append(self._leaf({**left, "type": rest}))
        return self._choice(options)

    def _kind_options(self, syntax: ValueSyntax, parts: list[dict[str, Any]], kinds: list[str]) -> list[str | None]:
        """Returns the expressions of the scalars among `kinds` that are not written as in JSON."""
        options: list[str | None] = [self._terminal(syntax.literals[kind]) for kind in kinds if kind in _LITERALS]
        if "string" in kinds and "string" not in syntax.kinds_as_json:
            found = syntax.strings(parts, f"S{len(self._rules)}")
            if found is not None:
                options.append(self._rule(found[0]))
                self._rules += found[1]
        return options

    def _literals(self, schema: Schema, syntax: ValueSyntax) -> str | None:
        """Returns the expression of listed values that are not written as in JSON."""
        if not isinstance(schema, dict):
            return None
        if schema.keys() - {"enum", "allOf", "type"} or schema.get("allOf"):
            raise NotWritten
        return self._choice([self._literal(value, syntax) for value in schema["enum"]])

    def _literal(self, value: Any, syntax: ValueSyntax) -> str | None:
        if isinstance(value, dict):
            listed = [(syntax.name(name), self._literal(value[name], syntax)) for name in self._ordered(value)]
            inner: list[str | None] = [name and one and f"{name} {self._colon} {one}" for name, one in listed]
        elif isinstance(value, list):
            inner = [self._literal(one, syntax) for one in value]
        else:
            return syntax.scalar(value)
        if not all(inner):
            return None
        begin, end = ('"{"', '"}"') if isinstance(value, dict) else ('"["', '"]"')
        return f"{begin} {self._gap} {f' {self._separator} '.join(map(str, inner))} {self._gap} {end}"

    def _ordered(self, names: Iterable[str]) -> list[str]:
        """Returns the names of members in the order in which they are written."""
        is_sorted = self._syntax is not None and self._syntax.has_sorted_names
        return sorted(names, key=str.lower) if is_sorted else list(names)

    def _name(self, name: str) -> str | None:
        """Returns the expression of a member's name; None if it cannot be written."""
        return quoted(json.dumps(name, ensure_ascii=False)) if self._syntax is None else self._syntax.name(name)

    def _leaf(self, schema: Schema) -> str | None:
        """Returns the rule of a schema that stays a JSON schema, or the terminal of a simple one."""
        if schema is False:
            return None
        body: dict[str, Any] = {} if schema is True else schema
        simple = simple_terminal(body)
        if simple is not None:
            return self._terminal(simple)
        key = json.dumps(body)
        if key not in self._written:
            needed = dict[str, Schema]()
            todo = {part["$ref"].removeprefix(_PREFIX) for part in parts_of(body) if "$ref" in part}
            while todo:
                needed |= {name: self._definitions[name] for name in sorted(todo)}
                todo = set[str]().union(*map(self._references.__getitem__, todo)) - needed.keys()
            whole = {**body, "$defs": needed} if needed else body
            self._written[key] = self._rule(f"%json {self._with_options(whole)}", "v")
        return self._written[key]

    def _number(self, parts: list[dict[str, Any]], kind: str) -> str | None:
        """Returns the expression of the numbers within the bounds of `parts`, and multiples as these say."""
        numbers, is_integer = number_range(parts), kind == "integer"
        steps = [Fraction(decimal_of(part["multipleOf"])) for part in parts if "multipleOf" in part]
        found = number_terminal(parts, kind)
        if found is None or not steps:
            return found and self._terminal(found)
        step = common_multiple(*steps)
        if kind == "fraction" and not numbers.has_fraction(step):
            return None
        if not numbers.has_multiple(step, is_integer=is_integer):
            return None
        multiples = multiples_of(step)
        if multiples is not None:
            return self._terminal(f"{found} & /{multiples}/")
        if kind == "fraction":
            raise NotWritten
        has_integers_only = is_integer or step.denominator == 1
        leaf = self._leaf(
            {"type": "integer" if has_integers_only else "number", "anyOf": multiples_within(numbers, step)}
        )
        return self._rule(f"{leaf} {self._terminal(_ZEROS)}?") if has_integers_only and not is_integer else leaf

    def _array(self, schema: dict[str, Any]) -> str | None:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        listed = [self._schema(inner) for inner in schema.get("prefixItems", ())]
        item = self._schema(schema.get("items", True))
        ends = [len(listed[: listed.index(None)])] if None in listed else [] if item is not None else [len(listed)]
        ends += [] if high is None else [high]
        most = min(ends, default=None)
        if most is not None and low > most:
            return None
        first = [one for one in listed[:most] if one is not None]
        num_more = None if most is None else most - len(first)
        items = self._sequences.of_items(first, item, low, max(low - len(first), 0), num_more)
        empty = f' | "[" {self._gap} "]"' if low == 0 and items else ""
        return self._rule(f'"[" {self._gap}{items}{self._gap} "]"{empty}')

    def _object(self, schema: dict[str, Any]) -> str | None:
        members = self._members(schema)
        if members is None:
            return None
        body = f'"{{" {self._gap}{self._sequences.of_members(members) if members else ""}{self._gap} "}}"'
        is_required = any(member.is_required for member in members)
        return self._rule(body + (f' | "{{" {self._gap} "}}"' if members and not is_required else ""))

    def _members(self, schema: dict[str, Any]) -> list[Member] | None:
        """Returns the members of an object in order: those listed, those only required, and any others.

        None if a required one has no value.
        """
        required = dict.fromkeys(schema.get("required", ()))
        named = dict.fromkeys((*schema.get("properties", ()), *required))
        members: list[Member] = []
        for name in self._ordered(named):
            value, written = self._schema(property_schema(schema, name)), self._name(name)
            if value is not None and written is not None:
                members.append(Member(f"{written} {self._colon} {value}", name in required))
            elif name in required:
                return None
        low, high = schema.get("minProperties", 0) - len(required), schema.get("maxProperties")
        if (low > 0 or high is not None) and len(members) > len(required):
            chosen = within_counts([member.is_required for member in members], low + len(required), high)
            if self._syntax is None or chosen is None:
                raise NotWritten
            kept = zip(members, chosen, strict=True)
            members, low = [Member(one.expression, must) for one, must in kept if must is not None], 0
            if high is not None:
                return members
        most = None if high is None else high - len(required)
        other = self._other_member(schema, list(named))
        if (most is not None and most < max(low, 0)) or (other is None and low > 0):
            return None
        if other is not None and most != 0:
            more = self._sequences.more(other, max(low - 1, 0), None if most is None else most - 1)
            members.append(Member(self._rule(f"{other} {more}"), low > 0))
        return members

    def _other_member(self, schema: dict[str, Any], names: list[str]) -> str | None:
        """Returns the expression of a member that is not listed; None if there is none.

        Beside `patternProperties`, which are anchored and disjoint, such a name has no escape, so that a pattern need
        not be followed through them.
        """
        patterns: dict[str, Schema] = schema.get("patternProperties", {})
        if not patterns and schema.get("additionalProperties") is False:
            return None
        listed = "|".join(regex_literal(json.dumps(name, ensure_ascii=False)) for name in names)
        any_name = f'/"{STRING_BYTE if not patterns else PLAIN_BYTE}*"/ & ~/({listed})/'
        matching = {f'/"{regex_to_lark(pattern[1:-1])}"/': inner for pattern, inner in patterns.items()}
        other = self._syntax and self._syntax.other_name(names, list(patterns))
        if other:
            any_name, matching = other[0], dict(zip(other[1], patterns.values(), strict=True))
        others = "".join(f" & ~{name}" for name in matching)
        terminals = [(f"{any_name} & {name}", inner) for name, inner in matching.items()]
        terminals.append((f"{any_name}{others}", schema.get("additionalProperties", True)))
        values = [(terminal, self._schema(inner)) for terminal, inner in terminals]
        return self._choice(
            [f"{self._terminal(terminal)} {self._colon} {value}" for terminal, value in values if value is not None]
        )
