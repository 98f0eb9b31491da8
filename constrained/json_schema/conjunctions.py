"""Rewrites the conjunctions of a rewritten schema, for schemas that the compiler cannot combine itself.

llguidance combines the schemas of an `allOf` when it reads them, each alternative of one with each of the others, and
the targets of references too. That does not end for recursive ones, and is too large for many alternatives. Here the
combination of some schemas becomes a definition of its own, made once and named by the set of these schemas. Cases that
have no value are left out.

    {allOf: [{$ref: tree}, {properties: {a: A}}]}  is  {properties: {a: {$ref: "A and B"}}}  for a tree of {a: B}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from plait.constrained.json_schema.emptiness import (
    OF_ARRAYS,
    OF_OBJECTS,
    Emptiness,
    item_schema,
    kinds_of,
    property_schema,
    scalar_keywords,
)
from plait.constrained.json_schema.equal_definitions import merge_equal_definitions
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.rewrite.patterns.operations import are_disjoint, matches_whole
from plait.constrained.regex.automaton_writer import MAX_STATES, NO_TEXT
from plait.constrained.regex.char_classes import write_literal
from plait.constrained.regex.pattern_algebra import intersect
from plait.constrained.specs import GrammarError

MAX_CASES = 200  # of one combination
MAX_DEFINITIONS = 3_000
MAX_INLINED = 100  # characters of a schema about scalars only; a longer one is a definition
LARGE = 20_000  # parts, after each alternative is combined with each other one
_NO_NAME = f"^(?:{NO_TEXT})$"
_PREFIX = "#/$defs/"
_ABOUT: dict[type, tuple[str, ...]] = {list: OF_ARRAYS, dict: OF_OBJECTS}
_STRUCTURED = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems"))


class CombinedTooLarge(GrammarError):
    """Raised if there are too many cases or definitions."""

    def __init__(self) -> None:
        super().__init__("its alternatives have too many combinations", "")


def combine_conjunctions(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns an equivalent schema in which only scalar keywords are combined by `allOf`.

    Proof: a value matches all of some schemas if it matches all of their keywords, for one alternative of each `anyOf`.
    A name must match what each schema says about it; likewise an item. Raises GrammarError if the result is too large
    or no value matches it.

    >>> combine_conjunctions({"type": "object", "allOf": [{"required": ["a"]}, {"properties": {"a": {"minimum": 1}}}]})
    {'type': ['object'], 'properties': {'a': {'minimum': 1}}, 'required': ['a']}
    """
    return _Combiner(schema).combined()


def is_large(schema: dict[str, Any]) -> bool:
    """Returns whether the compiler would combine many alternatives of a schema with each other.

    >>> is_large({"allOf": [{"anyOf": [{"minimum": n} for n in range(60)]}] * 3})
    True
    """
    return max(map(_weight, (schema, *schema.get("$defs", {}).values()))) > LARGE


def _weight(schema: Schema) -> int:
    if isinstance(schema, bool):
        return 1
    weight = 1 + sum(
        _weight(inner) for name in ("properties", "patternProperties") for inner in schema.get(name, {}).values()
    )
    weight += sum(_weight(schema[name]) for name in ("items", "additionalProperties") if name in schema)
    weight += sum(map(_weight, schema.get("prefixItems", ())))
    combined = [
        *schema.get("allOf", ()),
        *([{"anyOf": schema["anyOf"]}] if "anyOf" in schema and len(schema) > 1 else []),
    ]
    if not combined:
        return weight + sum(map(_weight, schema.get("anyOf", ())))
    num_cases = 1
    for inner in combined:
        num_cases *= len(inner["anyOf"]) if isinstance(inner, dict) and "anyOf" in inner else 1
    return min(num_cases * (weight + sum(map(_weight, combined))), 1 << 40)


class _Combiner:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = {name: value for name, value in schema.items() if name != "$defs"}
        self._known: dict[str, Schema] = schema.get("$defs", {})
        self._emptiness = Emptiness(self._known)
        self._children: dict[tuple[str, ...], Schema] = {}  # the JSON of schemas -> their combination
        self._plain: dict[str, Schema] = {}  # definitions of long schemas about scalars only
        self._num_named = 0
        self._todo: list[tuple[str, list[Schema]]] = []
        self._texts: dict[int, tuple[Schema, str]] = {}  # the id of a part, which is kept -> its JSON
        self._simples: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # likewise -> it without alternatives

    def combined(self) -> dict[str, Any]:
        definitions = {"": self._merged([self._root])}
        while self._todo:
            name, parts = self._todo.pop()
            definitions[name] = self._merged(parts)
        possible = Emptiness({**definitions, **self._plain}).without_empty()
        root = possible.pop("")
        if root is False:
            raise GrammarError("no value satisfies this schema", "")
        result: dict[str, Any] = {} if isinstance(root, bool) else dict(root)
        return merge_equal_definitions({**result, "$defs": possible}) if possible else result

    def _child(self, parts: Iterable[Schema]) -> Schema:
        """Returns the combination of schemas: a reference to it unless it is about scalars only."""
        listed = {self._text(part): part for part in parts if part is not True and part != {}}
        if any(part is False for part in listed.values()):
            return False
        if not listed:
            return True
        key = tuple(listed)
        if key not in self._children:
            self._children[key] = self._combination(list(listed.values()))
        return self._children[key]

    def _combination(self, parts: list[Schema]) -> Schema:
        if all(self._is_plain(part, frozenset()) for part in parts):
            merged = self._merged(parts)
            if isinstance(merged, bool) or len(json.dumps(merged)) <= MAX_INLINED:
                return merged
            name = f"s{len(self._plain)}"
            self._plain[name] = merged
            return {"$ref": _PREFIX + name}
        if self._num_named >= MAX_DEFINITIONS:
            raise CombinedTooLarge
        name = f"c{self._num_named}"
        self._num_named += 1
        self._todo.append((name, parts))
        return {"$ref": _PREFIX + name}

    def _text(self, part: Schema) -> str:
        if id(part) not in self._texts:
            self._texts[id(part)] = part, json.dumps(part, sort_keys=True)
        return self._texts[id(part)][1]

    def _simple_part(self, part: dict[str, Any]) -> dict[str, Any]:
        """Returns a schema without its reference, `allOf` and `anyOf`; the same object for the same schema."""
        if id(part) not in self._simples:
            self._simples[id(part)] = part, {k: v for k, v in part.items() if k not in ("$ref", "allOf", "anyOf")}
        return self._simples[id(part)][1]

    def _is_plain(self, schema: Schema, seen: frozenset[str]) -> bool:
        """Returns whether a schema has no schemas of properties and items, also in its alternatives and references."""
        if isinstance(schema, bool):
            return True
        if schema.keys() & _STRUCTURED:
            return False
        name = schema["$ref"].removeprefix(_PREFIX) if "$ref" in schema else None
        if name is not None and (name in seen or not self._is_plain(self._known[name], seen | {name})):
            return False
        return all(self._is_plain(inner, seen) for key in ("allOf", "anyOf") for inner in schema.get(key, ()))

    def _merged(self, parts: list[Schema]) -> Schema:
        found = [self._simple(case) for case in self._cases(parts, [], frozenset())]
        if len(found) == 1:
            return found[0]
        distinct = {json.dumps(one): one for one in found if one is not False}
        if not distinct:
            return False
        return next(iter(distinct.values())) if len(distinct) == 1 else {"anyOf": list(distinct.values())}

    def _cases(
        self, parts: list[Schema], flat: list[dict[str, Any]], seen: frozenset[str]
    ) -> list[list[dict[str, Any]]]:
        """Returns the cases of `parts` and `flat`: lists of schemas without references, `allOf` and `anyOf`."""
        alternatives: list[list[Schema]] = []
        flat, todo = list(flat), list(reversed(parts))
        while todo:
            part = todo.pop()
            if part is False:
                return []
            if part is True:
                continue
            if "$ref" in part:
                name = part["$ref"].removeprefix(_PREFIX)
                if name not in seen:
                    todo.append(self._known[name])
                seen |= {name}
            todo += reversed(part.get("allOf", ()))
            if "anyOf" in part:
                alternatives.append(part["anyOf"])
            simple = self._simple_part(part)
            if simple and simple not in flat:
                flat.append(simple)
        if self._emptiness.is_empty_conjunction(flat):
            return []
        if not alternatives:
            return [flat]
        rest: list[Schema] = [{"anyOf": other} for other in alternatives[1:]]
        cases = []
        for branch in alternatives[0]:
            cases += self._cases([branch, *rest], flat, seen)
            if len(cases) > MAX_CASES:
                raise CombinedTooLarge
        return cases

    def _simple(self, case: list[dict[str, Any]]) -> Schema:
        """Returns one schema for all of these, which have keywords but no alternatives and references."""
        if not case:
            return True
        kinds = kinds_of(case)
        out: dict[str, Any] = {"type": kinds} if any("type" in part for part in case) else {}
        if len(case) > 1 and any(isinstance(value, list | dict) for part in case for value in part.get("enum", ())):
            return self._listed(case)
        if "object" in kinds:
            self._object(case, out)
        if "array" in kinds:
            self._array(case, out)
        for low, high in (("minLength", "maxLength"), ("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
            _copy_bounds(case, out, low, high)
        scalars = [{name: value} for part in case for name, value in scalar_keywords(part).items()]
        if sum("enum" in one for one in scalars) > 1:
            common = _common_values([one["enum"] for one in scalars if "enum" in one])
            if not common:
                return False
            scalars = [{"enum": common}, *(one for one in scalars if "enum" not in one)]
        distinct = [one for at, one in enumerate(scalars) if one not in scalars[:at]]
        if len({name for one in distinct for name in one}) == len(distinct):
            return {**out, **{name: value for one in distinct for name, value in one.items()}}
        return {**out, "allOf": distinct}

    def _listed(self, case: list[dict[str, Any]]) -> Schema:
        """Returns one schema for all of these, one of which lists arrays or objects."""
        listed = next(part["enum"] for part in case if "enum" in part)
        kept = [value for value in listed if all(self._emptiness.admits(part, value) for part in case)]
        names = frozenset(name for part in case for name in part)
        if any(not names.isdisjoint(_ABOUT.get(type(value), ())) for value in kept):
            raise CombinedTooLarge  # listed arrays and objects are not compared with keywords about them here
        return {"enum": kept} if kept else False

    def _object(self, case: list[dict[str, Any]], out: dict[str, Any]) -> None:
        names = dict.fromkeys(name for part in case for name in part.get("properties", ()))
        if names:
            others = [bool(part.keys() & {"patternProperties", "additionalProperties"}) for part in case]
            saying: dict[str, list[Schema]] = {name: [] for name in names}
            for part, is_about_others in zip(case, others, strict=True):
                for name in names if is_about_others else part.get("properties", ()):
                    saying[name].append(property_schema(part, name))
            out["properties"] = {name: self._child(schemas) for name, schemas in saying.items()}
        if any("patternProperties" in part for part in case):
            patterns = _disjoint_patterns(case)
            out["patternProperties"] = {_without_names(one, names): self._child(patterns[one]) for one in patterns}
        if any("additionalProperties" in part for part in case):
            out["additionalProperties"] = self._child(part.get("additionalProperties", True) for part in case)
        required = dict.fromkeys(name for part in case for name in part.get("required", ()))
        if required:
            out["required"] = list(required)
        _copy_bounds(case, out, "minProperties", "maxProperties")

    def _array(self, case: list[dict[str, Any]], out: dict[str, Any]) -> None:
        num_listed = max(len(part.get("prefixItems", ())) for part in case)
        if num_listed:
            out["prefixItems"] = [self._child(item_schema(part, at) for part in case) for at in range(num_listed)]
        if any("items" in part for part in case):
            out["items"] = self._child(part.get("items", True) for part in case)
        _copy_bounds(case, out, "minItems", "maxItems")
        if any(part.get("uniqueItems") for part in case):
            out["uniqueItems"] = True


def _common_values(lists: list[list[Any]]) -> list[Any]:
    """Returns the values of the first list that equal one of each other list; none is an array or an object.

    The compiler would compare each value of one list with each of the others, as patterns.
    """
    keys = [{(isinstance(value, bool), value) for value in listed} for listed in lists[1:]]
    return [value for value in lists[0] if all((isinstance(value, bool), value) in known for known in keys)]


def _disjoint_patterns(case: list[dict[str, Any]]) -> dict[str, list[Schema]]:
    """Returns disjoint patterns of names, and for each what the schemas say about such a name."""
    found: dict[str, list[Schema]] = {}
    others: list[Schema] = []
    for part in case:
        patterns, additional = part.get("patternProperties", {}), part.get("additionalProperties", True)
        if found.keys() == patterns.keys():
            found = {pattern: [*schemas, patterns[pattern]] for pattern, schemas in found.items()}
            others.append(additional)
            continue
        divided: dict[str, list[Schema]] = {}
        for pattern, schemas in found.items():
            for own, schema in patterns.items():
                _add(divided, _both(pattern, own), [*schemas, schema])
                pattern = _both(pattern, own, negated=True)
            _add(divided, pattern, [*schemas, additional])
        for own, schema in patterns.items():
            rest = own
            for pattern in found:
                rest = _both(rest, pattern, negated=True)
            _add(divided, rest, [*others, schema])
        found = divided
        others.append(additional)
    return found


def _both(one: str, other: str, *, negated: bool = False) -> str:
    """Returns the pattern of the names that match both, or only the first one."""
    if are_disjoint(one[4:-2], other[4:-2]):
        return one if negated else _NO_NAME
    return f"^(?:{intersect(one[4:-2], other[4:-2], negated=negated).pattern})$"


def _add(found: dict[str, list[Schema]], pattern: str, schemas: list[Schema]) -> None:
    if pattern != _NO_NAME:
        found[pattern] = schemas


def _without_names(pattern: str, names: Iterable[str]) -> str:
    """Returns a pattern without listed names, which the compiler would combine with the schema of the pattern again."""
    matching = [name for name in names if matches_whole(pattern, name)]
    if not matching or _num_rests(matching) > MAX_STATES:
        return pattern
    try:
        return f"^(?:{intersect(pattern[4:-2], '|'.join(map(write_literal, matching)), negated=True).pattern})$"
    except GrammarError:
        return pattern


def _num_rests(names: list[str]) -> int:
    """Returns the number of states of the minimal automaton of some names, which one without them hardly has fewer."""
    rests: dict[str, set[str]] = {}
    for name in names:
        for at in range(len(name) + 1):
            rests.setdefault(name[:at], set()).add(name[at:])
    return len(set(map(frozenset, rests.values())))


def _copy_bounds(case: list[dict[str, Any]], out: dict[str, Any], low: str, high: str) -> None:
    for name, choose in ((low, max), (high, min)):
        bounds = [part[name] for part in case if name in part]
        if bounds:
            out[name] = choose(bounds)
