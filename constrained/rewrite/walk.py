"""Walks a schema, applies the rewrites, and writes what is left in the keywords that the compiler honours.

Knows: the order of rewrites, pointers, and what may be dropped. Must not know: what any rewrite does. Each `$ref`
becomes a definition of its own, rewritten once, so recursion ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from plait.constrained.rewrite.arrays import contains, unevaluated_items, unique_items
from plait.constrained.rewrite.bounds import exact_numbers
from plait.constrained.rewrite.document import Document, Schema, escaped, subschemas
from plait.constrained.rewrite.finite import check_writable, folded, modern
from plait.constrained.rewrite.formats import FORMATS
from plait.constrained.rewrite.keywords import ANNOTATIONS, ASSERTIONS, REFUSED, check_shape, unknown
from plait.constrained.rewrite.logic import if_, not_, one_of
from plait.constrained.rewrite.objects import (
    count_properties,
    dependent_required,
    dependent_schemas,
    property_names,
    unevaluated,
)
from plait.constrained.rewrite.patterns import disjoint, matches, plain_of
from plait.constrained.rewrite.rules import Object, Objection, Rewrite
from plait.constrained.specs import GrammarError

REWRITES: tuple[Rewrite, ...] = (
    folded,  # before what is spelled for another draft than the validator's
    unique_items,
    folded,
    modern,
    exact_numbers,
    unevaluated,
    unevaluated_items,
    one_of,
    not_,
    if_,
    dependent_required,
    dependent_schemas,
    property_names,
    contains,
    count_properties,
)
MAX_PARTS = 50_000
MAX_NESTING = 400
_COPIED: tuple[str, ...] = (
    "type",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
)
_COPIED += ("multipleOf", "minItems", "maxItems", "required", "minProperties", "maxProperties")


@dataclass(frozen=True)
class Rewritten:
    """An equal schema in the compiler's keywords, and the pointers of what was dropped on the user's demand."""

    schema: Object
    unchecked: tuple[str, ...]


def rewritten(text: str, *, annotations: bool = False, lenient: bool = False) -> Rewritten:
    """The schema `text` in the compiler's keywords; GrammarError with a JSON pointer where there is no equal one.

    >>> rewritten('{"oneOf": [{"type": "null"}, {"const": 3}]}').schema
    {'anyOf': [{'enum': [None]}, {'enum': [3]}]}
    """
    return _Walk(Document(text), annotations, lenient).whole()


def rewritten_part(document: Document, schema: Schema, at: str) -> Schema:
    """`schema`, a part of `document` or made of its parts, by itself; what lenient drops is dropped.

    >>> rewritten_part(Document("{}"), {"const": 3}, "")
    {'enum': [3]}
    """
    return _Walk(document, annotations=True, lenient=True).part(schema, at)


class _Walk:
    def __init__(self, document: Document, annotations: bool, lenient: bool) -> None:
        self._document, self._annotations, self._lenient = document, annotations, lenient
        self._unchecked: dict[str, None] = {}
        self._definitions: dict[str, Schema] = {}
        self._names: dict[int, str] = {}
        self._parts = self._nesting = 0

    def whole(self) -> Rewritten:
        for at, part in subschemas(self._document.schema, ""):
            self._check_names(part, at)
        schema = self._schema(self._document.schema, "", frozenset())
        if schema is False:
            raise GrammarError("no value is valid by this schema", "")
        body: Object = {} if schema is True else dict(schema)
        if self._definitions:
            body["$defs"] = self._definitions
        return Rewritten(body, tuple(self._unchecked))

    def part(self, schema: Schema, at: str) -> Schema:
        """One part and the definitions that it needs."""
        found = self._schema(schema, at, frozenset())
        return {**found, "$defs": self._definitions} if self._definitions and isinstance(found, dict) else found

    def _check_names(self, part: Object, at: str) -> None:
        """Refuse, or drop, what is no keyword; then each keyword's value is of its kind."""
        for name in list(part):
            if name in ASSERTIONS:
                check_shape(name, part[name], at)
                if name == "format" and part[name] not in FORMATS and not self._annotations:
                    self._cannot(f"the format {part[name][:40]!r} is not known", at, part, name)
            elif name in REFUSED:
                self._cannot(REFUSED[name], at, part, name)
            elif name not in ANNOTATIONS and not self._annotations:
                reason = unknown(name, part[name])
                if reason is not None:
                    self._cannot(reason, at, part, name)

    def _cannot(self, reason: str, at: str, part: Object, *names: str) -> None:
        """GrammarError; or, where the user said so, `names` are gone from `part` and noted."""
        if not self._lenient:
            raise GrammarError(reason[:200], f"{at}/{names[0] if '/' in names[0] else escaped(names[0])}")
        for name in names:
            if name in part:
                del part[name]
                self._unchecked[f"{at}/{escaped(name)}"] = None

    def _schema(self, schema: Schema, at: str, holding: frozenset[int]) -> Schema:
        """`schema` rewritten; `holding` are the references followed without entering a part of the value."""
        at = self._document.pointer(schema, at)
        if isinstance(schema, bool):
            return schema
        self._parts += 1
        self._nesting += 1
        if self._parts > MAX_PARTS or self._nesting > MAX_NESTING:
            raise GrammarError("written out, the schema is too large", at)
        made: Object = {name: value for name, value in schema.items() if name in ASSERTIONS}
        for rewrite in REWRITES:
            made = self._applied(rewrite, made, at)
        written = self._written(made, at, holding)
        self._nesting -= 1
        return written

    def _applied(self, rewrite: Rewrite, schema: Object, at: str) -> Object:
        for _ in range(len(schema) + 1):
            try:
                found = rewrite(schema, self._document)
                return schema if found is None else found
            except Objection as objection:
                schema = dict(schema)
                named = [name for name in objection.keywords if name in schema]
                if not named:
                    named = [objection.keywords[0].partition("/")[0]]
                if not self._lenient:
                    raise GrammarError(objection.reason, f"{at}/{objection.keywords[0]}") from None
                self._cannot(objection.reason, at, schema, *named)
        return schema

    def _written(self, schema: Object, at: str, holding: frozenset[int]) -> Schema:
        if "enum" in schema and not schema["enum"]:
            return False
        out: Object = {name: schema[name] for name in _COPIED if name in schema}
        every: list[Schema] = []
        if "enum" in schema:
            every.append(self._enum(schema, at))
        every += self._texts(schema, at)
        self._children(schema, out, at)
        if "$ref" in schema:
            every.append(self._reference(schema["$ref"], at, holding))
        every += [self._schema(inner, f"{at}/allOf/{i}", holding) for i, inner in enumerate(schema.get("allOf", ()))]
        if "anyOf" in schema:
            every.append(self._any(schema["anyOf"], at, holding))
        if any(one is False for one in every):
            return False
        every = [one for one in every if one is not True and one != {}]
        if not out and len(every) == 1:
            return every[0]
        return {**out, "allOf": every} if every else out

    def _enum(self, schema: Object, at: str) -> Schema:
        try:
            check_writable(schema["enum"])
        except Objection as objection:
            self._cannot(objection.reason, at, dict(schema), "enum")
            return True
        return {"enum": schema["enum"]}

    def _any(self, branches: list[Schema], at: str, holding: frozenset[int]) -> Schema:
        found = [self._schema(inner, f"{at}/anyOf/{i}", holding) for i, inner in enumerate(branches)]
        if any(one is True or one == {} for one in found):
            return True
        found = [one for one in found if one is not False]
        return {"anyOf": found} if len(found) > 1 else found[0] if found else False

    def _texts(self, schema: Object, at: str) -> list[Schema]:
        """What `pattern` and `format` demand, each as a pattern of whole texts."""
        found: list[Schema] = []
        for name in ("pattern", "format"):
            if name not in schema or (name == "format" and schema[name] not in FORMATS):
                continue
            pattern = schema[name] if name == "pattern" else f"^(?:{FORMATS[schema[name]]})$"
            try:
                found.append({"pattern": f"^(?:{plain_of(pattern).pattern})$"})
            except GrammarError as error:
                self._cannot(error.reason, at, dict(schema), name)
        return found

    def _children(self, schema: Object, out: Object, at: str) -> None:
        """The schemas of an object's properties and an array's items."""
        fresh: frozenset[int] = frozenset()
        for name in ("items", "additionalProperties"):
            if name in schema:
                out[name] = self._schema(schema[name], f"{at}/{name}", fresh)
        if "prefixItems" in schema:
            listed = enumerate(schema["prefixItems"])
            out["prefixItems"] = [self._schema(inner, f"{at}/prefixItems/{i}", fresh) for i, inner in listed]
        if "properties" in schema:
            named = schema["properties"].items()
            out["properties"] = {n: self._schema(s, f"{at}/properties/{escaped(n)}", fresh) for n, s in named}
        if schema.get("patternProperties"):
            self._patterns(schema, out, at)

    def _patterns(self, schema: Object, out: Object, at: str) -> None:
        """Patterns of names, each whole, and none matching a name that another one or the list matches."""
        found: dict[str, Schema] = {}
        try:
            for pattern, inner in schema["patternProperties"].items():
                plain = plain_of(pattern).pattern
                found[f"^(?:{plain})$"] = self._schema(inner, f"{at}/patternProperties/{escaped(pattern)}", frozenset())
            self._add_matched(schema, out, at)
            for (one, a), (two, b) in combinations(found.items(), 2):
                if a != b and not disjoint(one[1:-1], two[1:-1]):
                    raise Objection("two patterns are not proved to exclude each other", "patternProperties")
        except (GrammarError, Objection) as error:
            if isinstance(error, GrammarError) and isinstance(error.where, str):
                raise
            self._cannot(error.reason, at, dict(schema), "patternProperties")
            return
        if len({repr(inner) for inner in found.values()}) < len(found):
            found = _grouped(found)
        out["patternProperties"] = found

    def _add_matched(self, schema: Object, out: Object, at: str) -> None:
        """A listed name that a pattern matches must meet that pattern's schema as well."""
        for name, inner in list(out.get("properties", {}).items()):
            for pattern, demanded in schema["patternProperties"].items():
                if matches(pattern, name):
                    more = self._schema(demanded, f"{at}/patternProperties/{escaped(pattern)}", frozenset())
                    inner = False if inner is False or more is False else {"allOf": [inner, more]}
                    out["properties"][name] = inner if inner is not False else False

    def _reference(self, reference: Any, at: str, holding: frozenset[int]) -> Schema:
        target = self._document.target(reference, f"{at}/$ref")
        if isinstance(target, bool):
            return target
        if id(target) in holding:
            raise GrammarError("the reference leads back to itself with nothing in between", f"{at}/$ref")
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._definitions[name] = True
            self._definitions[name] = self._schema(target, at, holding | {id(target)})
        return {"$ref": f"#/$defs/{name}"}


def _grouped(found: dict[str, Schema]) -> dict[str, Schema]:
    """Patterns with one schema between them joined into one pattern, so that they may overlap."""
    groups: dict[str, tuple[list[str], Schema]] = {}
    for pattern, inner in found.items():
        groups.setdefault(repr(inner), ([], inner))[0].append(pattern[1:-1])
    return {f"^(?:{'|'.join(patterns)})$": inner for patterns, inner in groups.values()}
