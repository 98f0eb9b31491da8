"""The properties of an object as a sequence of elements, each with marks of its own, as Lark rules.

    value0f0: "<p=a>" value0v0 value0t1 | value0f1      no element yet: `a` is the first one, or is left out
    value0t1: "\\n<p=b>" value0v1 value0t2                behind an element: the required `b`
    value0v0: value and close

Some objects that the schema allows are left out, so that every text reads back: those with a name that the opening mark
cannot hold, with names of `patternProperties`, and with `minProperties` or `maxProperties` all but some that satisfy
these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from plait.constrained.guidance.call_tracker import CallText, ElementText
from plait.constrained.json_schema.conjunctions import combine_conjunctions
from plait.constrained.json_schema.emptiness import kinds_of, property_schema
from plait.constrained.json_schema.lark_scalars import regex_literal
from plait.constrained.json_schema.lark_sequences import within_counts
from plait.constrained.json_schema.rewrite.document import Schema, escape_pointer_token
from plait.constrained.json_schema.schema_compiler import rewritten_schema
from plait.constrained.json_schema.unique_parts import separate_unique_items
from plait.constrained.specs import NAME_PLACE, GrammarError, JsonSchema
from plait.constrained.structural.marks import Marks
from plait.constrained.structural.value_kinds import value_kinds

MAX_PARAMETERS = 256  # llguidance compiles a chain of optional ones by recursion
FURTHER_NAME = "[A-Za-z0-9_.-]{1,64}"
_PLAIN = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "minProperties", "maxProperties")
)


@dataclass(frozen=True)
class ElementForm:
    """How elements are written. `open` has {name} once. name: a pattern of names that are not listed, and with
    `only_such_names` of all."""

    open: str
    close: str
    separator: str
    end: str
    name: str = FURTHER_NAME
    only_such_names: bool = False


@dataclass(frozen=True)
class ElementValue:
    """The expression of a value and its close, and its rules. readings: pairs of a pattern of what stands between the
    opening mark and the value, and the bytes with which the value begins where it is JSON; see ElementText."""

    expression: str
    rules: list[str]
    readings: tuple[tuple[bytes, tuple[bytes, ...]], ...]


WriteValue = Callable[[Schema, dict[str, Any], str, frozenset[str]], ElementValue | None]
"""Returns the value of a schema with its definitions, None if there is none; its rules begin with the given name. The
types are those that a reader expects, which knows the parameter's name only."""


class _Objects(NamedTuple):
    """The kinds of objects that a rewritten schema allows, with its definitions."""

    cases: list[dict[str, Any]]
    definitions: dict[str, Any]

    def schemas(self, name: str | None) -> list[Schema]:
        """The schemas of a listed parameter; with None those of parameters that are not listed."""
        if name is None:
            return [case.get("additionalProperties", True) for case in self.cases]
        listed = [case for case in self.cases if name in case.get("properties", ()) or name in case.get("required", ())]
        return [property_schema(case, name) for case in listed]

    def kinds(self, name: str | None) -> frozenset[str]:
        """The types that the values of a parameter have in any of the objects."""
        return frozenset(kind for schema in self.schemas(name) for kind in value_kinds(schema, self.definitions))

    @property
    def listed(self) -> set[str]:
        """The names of all parameters that are listed."""
        return {name for case in self.cases for name in (*case.get("properties", ()), *case.get("required", ()))}


def _objects(schema: dict[str, Any]) -> _Objects:
    whole = schema if schema.keys() <= _PLAIN else combine_conjunctions(schema)
    cases = whole.get("anyOf", [whole])
    objects = [case for case in cases if "object" in kinds_of([case]) and "enum" not in case]
    return _Objects(objects, whole.get("$defs", {}))


@lru_cache(maxsize=256)
def parameter_kinds(schema: str) -> Mapping[str | None, frozenset[str]]:
    """Returns {name of a parameter: the JSON types that its values have} of a schema of elements, for their reader.

    None stands for a parameter that is not listed. Raises GrammarError, as the constraint does.

    >>> parameter_kinds('{"properties": {"a": {"$ref": "#x"}}, "$defs": {"b": {"$anchor": "x", "type": "null"}}}')["a"]
    frozenset({'null'})
    """
    found = _objects(rewritten_schema(JsonSchema(schema, annotations=True)).schema)
    return {name: found.kinds(name) for name in (*found.listed, None)}


class ElementRules:
    """Writes the rules of one content. Raises GrammarError for a schema that has no form in elements."""

    def __init__(self, spec: JsonSchema, form: ElementForm, name: str, marks: Marks, write_value: WriteValue) -> None:
        self._form, self._name, self._marks, self._write_value = form, name, marks, write_value
        rewritten = rewritten_schema(spec)
        self.unchecked, self.warnings = rewritten.unchecked, rewritten.warnings
        schema, self.unique = separate_unique_items(rewritten.schema)
        self.rules: list[str] = []
        self._elements: dict[ElementText, None] = {}
        self._others: dict[ElementText, None] = {}
        self._num_values = 0
        self._unwritable = ""  # the last required parameter without a value
        self._objects = _objects(schema)
        if not self._objects.cases:
            raise GrammarError("it allows no object that can be written as elements")
        starts = [self._sequence(case, f"{name}c{index}") for index, case in enumerate(self._objects.cases)]
        if not any(starts):
            reason = "no value of a required parameter can be written as an element"
            raise GrammarError(
                reason, f"/properties/{escape_pointer_token(self._unwritable)}" if self._unwritable else ""
            )
        self.expression = f"({' | '.join(start for start in starts if start)}) {marks.literal(form.end, with_id=True)}"

    def text(self) -> CallText:
        """Returns how the content is followed; the call's own marks and schema are added to it."""
        close, separator = self._marks.pattern(self._form.close), self._marks.pattern(self._form.separator)
        elements = (*self._elements, *self._others)
        return CallText(b"", b"", elements=elements, close=close, separator=separator)

    def _sequence(self, case: dict[str, Any], name: str) -> str | None:
        """Adds the rules of one kind of object. Returns the name of the first one; None if it has no value."""
        members = self._members(case)
        if members is None:
            return None
        more = bool(self._form.separator)
        further = self._further(case)
        for at in range(len(members), -1, -1):
            for state in ("f", "t") if more else ("f",):
                after = f"{name}{'t' if more else 'f'}{at + 1}"
                if at == len(members):
                    self.rules.append(f"{name}{state}{at}: {self._end_of_sequence(further, state == 't' or not more)}")
                    continue
                parameter, value, is_required = members[at]
                opening = self._opening(parameter, is_first=state == "f")
                skip = "" if is_required else f" | {name}{state}{at + 1}"
                self.rules.append(f"{name}{state}{at}: {opening} {value.expression} {after}{skip}")
        return f"{name}f0"

    def _end_of_sequence(self, further: tuple[str, str] | None, may_repeat: bool) -> str:
        if further is None:
            return '""'
        first, more = further
        return f"({more})*" if may_repeat else f'{first} ({more})* | ""'

    def _members(self, case: dict[str, Any]) -> list[tuple[str, ElementValue, bool]] | None:
        """Returns the listed parameters of an object, in order: name, value, and whether it must occur."""
        required = dict.fromkeys(case.get("required", ()))
        names = dict.fromkeys((*case.get("properties", ()), *required))
        if len(names) > MAX_PARAMETERS:
            raise GrammarError(f"more than {MAX_PARAMETERS} parameters in elements")
        members: list[tuple[str, ElementValue, bool]] = []
        for name in names:
            value = self._value(property_schema(case, name), name) if self._can_hold(name) else None
            if value is not None:
                members.append((name, value, name in required))
                before, after = self._form.open.split(NAME_PLACE)
                opening = self._marks.pattern(before, name, after)
                self._elements |= {
                    ElementText(name, opening + closing, begins): None for closing, begins in value.readings
                }
            elif name in required:
                self._unwritable = name
                return None
        are_required = [is_required for *_, is_required in members]
        chosen = within_counts(are_required, case.get("minProperties", 0), case.get("maxProperties"))
        if chosen is None:
            return None
        return [(name, value, must) for (name, value, _), must in zip(members, chosen, strict=True) if must is not None]

    def _further(self, case: dict[str, Any]) -> tuple[str, str] | None:
        """Returns the expressions of a parameter that is not listed, as the first element and behind another one."""
        schema = case.get("additionalProperties", True)
        if schema is False or "patternProperties" in case or "maxProperties" in case:
            return None
        value = self._value(schema, None)
        if value is None:
            return None
        before, after = self._form.open.split(NAME_PLACE)
        opening = self._marks.pattern(before) + f"(?:{self._form.name})".encode() + self._marks.pattern(after)
        self._others |= {ElementText("", opening + closing, begins): None for closing, begins in value.readings}
        listed = "|".join(map(regex_literal, sorted(self._objects.listed)))
        names = f"/{self._form.name}/" + (f" & ~/{listed}/" if listed else "")
        name = f"{self._name.upper()}N{len(self.rules)}"
        first = self._marks.around(before, names, after, f"{name}F")
        more = self._marks.around(self._form.separator + before, names, after, f"{name}M")
        self.rules += [*first[1], *more[1]]
        return f"{first[0]} {value.expression}", f"{more[0]} {value.expression}"

    def _value(self, schema: Schema, name: str | None) -> ElementValue | None:
        self._num_values += 1
        kinds = self._objects.kinds(name)
        value = self._write_value(schema, self._objects.definitions, f"{self._name}v{self._num_values}", kinds)
        if value is not None:
            self.rules += value.rules
        return value

    def _can_hold(self, name: str) -> bool:
        """Returns whether a reader of the opening mark finds this name in it."""
        if self._form.only_such_names:
            return re.fullmatch(self._form.name, name) is not None
        return bool(name) and self._form.open.split(NAME_PLACE)[1] not in name

    def _opening(self, name: str, *, is_first: bool) -> str:
        before, after = self._form.open.split(NAME_PLACE)
        return self._marks.literal(("" if is_first else self._form.separator) + before, name, after)
