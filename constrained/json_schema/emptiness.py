"""What rewritten schemas say, and which of them no value matches. One that is not found to be empty may be empty."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from fractions import Fraction
from typing import Any

from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.rewrite.enums import canonical_json
from plait.constrained.json_schema.rewrite.numbers import BOUNDS, decimal_of, number_range
from plait.constrained.json_schema.rewrite.patterns.operations import matches_whole
from plait.constrained.json_schema.subschemas import with_inner

MAX_DEPTH = 6
MAX_LISTED = 60
MAX_ITEMS = 16
MAX_QUESTIONS = 1000  # about inner conjunctions, to answer one
KINDS = ("null", "boolean", "object", "array", "string", "number")
OF_NUMBERS = ("integer", "fraction")  # the two parts of "number"; a fraction, only in rewritten schemas, is no integer
_KIND_OF: dict[type, str] = {
    type(None): "null", bool: "boolean", str: "string", dict: "object", list: "array",
}  # fmt: skip
_PREFIX = "#/$defs/"
OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems", "uniqueItems")
_OF_LENGTH = ("minLength", "maxLength")
_COMBINED = frozenset((*OF_OBJECTS, *OF_ARRAYS, *BOUNDS, *_OF_LENGTH, "type"))


def kinds_of(parts: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the types that all of some schemas allow.

    >>> kinds_of([{"type": ["number", "null"]}, {"type": "integer"}])
    ['integer']
    """
    kinds = list(KINDS)
    for part in parts:
        if (type_ := part.get("type")) is None:
            continue
        listed = [type_] if isinstance(type_, str) else type_
        both = [kind for kind in kinds if kind in listed or (kind in OF_NUMBERS and "number" in listed)]
        is_narrower = "number" in kinds and "number" not in listed
        kinds = both + [kind for kind in OF_NUMBERS if is_narrower and kind in listed]
    return kinds


def is_of_kind(value: Any, kinds: Container[str]) -> bool:
    """Returns whether the type of a JSON value is among `kinds`.

    >>> is_of_kind(1.0, ["integer"]), is_of_kind(1.0, ["fraction"]), is_of_kind(1.5, ["number"])
    (True, False, True)
    """
    kind = _KIND_OF.get(type(value), "number")
    return kind in kinds or (kind == "number" and OF_NUMBERS[bool(value % 1)] in kinds)


def scalar_keywords(part: dict[str, Any]) -> dict[str, Any]:
    """Returns the keywords of a schema that are about neither objects nor arrays, without bounds.

    >>> scalar_keywords({"type": "object", "enum": [1], "minItems": 2})
    {'enum': [1]}
    """
    return {name: value for name, value in part.items() if name not in _COMBINED}


def property_schema(part: dict[str, Any], name: str) -> Schema:
    """Returns what a rewritten schema says about a property; `properties` has what the patterns say about its names.

    >>> property_schema({"patternProperties": {"^(?:a)$": False}}, "a")
    False
    """
    if name in part.get("properties", {}):
        found: Schema = part["properties"][name]
        return found
    patterns = part.get("patternProperties", {})
    matching = next((pattern for pattern in patterns if matches_whole(pattern, name)), None)
    other: Schema = part.get("additionalProperties", True) if matching is None else patterns[matching]
    return other


def item_schema(part: dict[str, Any], at: int) -> Schema:
    """Returns what a rewritten schema says about the item at a place of an array.

    >>> item_schema({"prefixItems": [False], "items": True}, 1)
    True
    """
    listed = part.get("prefixItems", ())
    found: Schema = listed[at] if at < len(listed) else part.get("items", True)
    return found


class Emptiness:
    """What is known to be empty among schemas that refer to these definitions."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._admitted: dict[tuple[int, type, Any], tuple[Schema, bool]] = {}  # by the id of a schema, which is kept

    def is_empty_conjunction(self, parts: list[Any], depth: int = 0) -> bool:
        """Returns whether it is found that no value matches all of `parts`, in a bounded number of steps."""
        if not depth:
            self._num_left = MAX_QUESTIONS
        flat, alternatives = self._flattened(parts)
        return flat is None or self._is_empty(flat, alternatives, depth)

    def _is_empty(self, flat: list[dict[str, Any]], alternatives: list[list[Schema]], depth: int) -> bool:
        """Answers for schemas whose references and `allOf` are among them, and one branch of each of `alternatives`."""
        kinds = kinds_of(flat)
        listed = next((part["enum"] for part in flat if "enum" in part), None)
        if listed is not None and len(listed) <= MAX_LISTED:
            return not any(all(self._admits_listed(part, value) for part in flat) for value in listed)
        if not kinds or (set(kinds) <= {"number", *OF_NUMBERS} and number_range(flat).is_empty):
            return True
        self._num_left -= 1
        if depth >= MAX_DEPTH or self._num_left < 0:
            return False
        if kinds == ["object"] and self._lacks_names(flat, depth):
            return True
        if kinds == ["array"]:
            count = max(part.get("minItems", 0) for part in flat)
            for at in range(min(count, MAX_ITEMS)):
                if self.is_empty_conjunction([item_schema(part, at) for part in flat], depth + 1):
                    return True
        return depth > 0 and any(
            all(
                self._is_empty_with(branch, flat, alternatives[:at] + alternatives[at + 1 :], depth + 2)
                for branch in branches
            )
            for at, branches in enumerate(alternatives)
            if len(branches) <= 8
        )

    def _is_empty_with(
        self, branch: Schema, flat: list[dict[str, Any]], alternatives: list[list[Schema]], depth: int
    ) -> bool:
        """Answers for `flat` and one branch more."""
        more, inner = self._flattened([branch])
        if more is None:
            return True
        known = set(map(id, flat))
        return self._is_empty([*flat, *(part for part in more if id(part) not in known)], alternatives + inner, depth)

    def _lacks_names(self, flat: list[dict[str, Any]], depth: int) -> bool:
        """Returns whether it is found that a required name, or a name that the minimum needs, has no value."""

        def has_value(name: str) -> bool:
            return not self.is_empty_conjunction([property_schema(part, name) for part in flat], depth + 1)

        if not all(has_value(name) for name in sorted({name for part in flat for name in part.get("required", ())})):
            return True
        count = max(part.get("minProperties", 0) for part in flat)
        names = {name for part in flat for name in part.get("properties", ())}
        if not count or len(names) > MAX_LISTED or any(part.get("patternProperties") for part in flat):
            return False
        others = [part.get("additionalProperties", True) for part in flat]
        return self.is_empty_conjunction(others, depth + 1) and count > sum(map(has_value, names))

    def _flattened(self, parts: list[Any]) -> tuple[list[dict[str, Any]] | None, list[list[Schema]]]:
        """Returns (the schemas without references, `allOf` and `anyOf`, or None if one is false; the alternatives)."""
        flat, alternatives = dict[int, dict[str, Any]](), list[list[Schema]]()  # the schemas by their ids
        todo = list(parts)
        while todo:
            part = todo.pop()
            if part is False:
                return None, []
            if part is True or id(part) in flat:
                continue
            flat[id(part)] = part
            if "$ref" in part:
                todo.append(self._definitions.get(part["$ref"].removeprefix(_PREFIX), True))
            todo += part.get("allOf", ())
            if "anyOf" in part:
                alternatives.append(part["anyOf"])
        return list(flat.values()), alternatives

    def _admits_listed(self, schema: Schema, value: Any) -> bool:
        """Returns what `admits` does, which is asked of the same schema and value in many conjunctions."""
        if isinstance(value, list | dict):
            return self.admits(schema, value)
        key = (id(schema), type(value), value)
        if key not in self._admitted:
            self._admitted[key] = schema, self.admits(schema, value)
        return self._admitted[key][1]

    def admits(self, schema: Schema, value: Any, depth: int = 0) -> bool:
        """Returns False if it is found that a value does not match a schema."""
        if isinstance(schema, bool) or depth > MAX_DEPTH:
            return schema is not False
        if not is_of_kind(value, kinds_of([schema])):
            return False
        if "enum" in schema and not any(_is_equal(one, value) for one in schema["enum"]):
            return False
        if _violates_bound(schema, value):
            return False
        if "$ref" in schema:
            target = self._definitions.get(schema["$ref"].removeprefix(_PREFIX), True)
            if not self.admits(target, value, depth + 1):
                return False
        if not all(self.admits(inner, value, depth + 1) for inner in schema.get("allOf", ())):
            return False
        return "anyOf" not in schema or any(self.admits(inner, value, depth + 1) for inner in schema["anyOf"])

    def without_empty(self) -> dict[str, Schema]:
        """Returns the definitions without references to those that no finite value matches.

        A definition has a value if its schema has one when all definitions without a known value have none.
        """
        having: set[str] = set()
        while True:
            more = {
                name for name, schema in self._definitions.items() if name not in having and _has_value(schema, having)
            }
            if not more:
                break
            having |= more
        if len(having) == len(self._definitions):
            return dict(self._definitions)
        return {
            name: _without(schema, having) for name, schema in self._definitions.items() if name in having or not name
        }


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | dict):
        return isinstance(other, list | dict) and canonical_json(one) == canonical_json(other)
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)


def _violates_bound(schema: dict[str, Any], value: Any) -> bool:
    """Returns whether a text or a number violates a keyword about those."""
    if value is None or isinstance(value, bool | list | dict):
        return False
    if isinstance(value, str):
        low, high = schema.get("minLength", 0), schema.get("maxLength", len(value))
        return not low <= len(value) <= high or ("pattern" in schema and not matches_whole(schema["pattern"], value))
    number, step = decimal_of(value), Fraction(decimal_of(schema.get("multipleOf", 0)))
    is_multiple = not step or (number.is_finite() and Fraction(number) % step == 0)
    return not (is_multiple and number_range([schema]).contains(value))


def _has_value(schema: Schema, having: set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix(_PREFIX) not in having:
        return False
    if "anyOf" in schema and not any(_has_value(inner, having) for inner in schema["anyOf"]):
        return False
    if not all(_has_value(inner, having) for inner in schema.get("allOf", ())):
        return False
    kinds = kinds_of([schema])
    if kinds == ["object"]:
        return all(_has_value(property_schema(schema, name), having) for name in schema.get("required", ()))
    if kinds == ["array"]:
        listed, items = schema.get("prefixItems", ()), schema.get("items", True)
        count = schema.get("minItems", 0)
        return all(_has_value(inner, having) for inner in listed[:count]) and (
            count <= len(listed) or _has_value(items, having)
        )
    return True


def _without(schema: Schema, having: set[str]) -> Schema:
    """Returns a schema with false in place of the schemas that have no value."""
    if isinstance(schema, bool) or not _has_value(schema, having):
        return schema is True
    if "anyOf" in schema:
        schema = {**schema, "anyOf": [inner for inner in schema["anyOf"] if _has_value(inner, having)]}
    return with_inner(schema, lambda inner: _without(inner, having))
