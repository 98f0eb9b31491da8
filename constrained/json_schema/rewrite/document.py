"""A parsed schema: its limits, the pointer of each subschema, its references, and validation against any part of it.

References are never fetched: one that leads outside of the schema is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

import jsonschema_rs

from plait.constrained.json_schema.rewrite.references.dynamic_scopes import (
    StaticCopier,
    has_dynamic_references,
)
from plait.constrained.json_schema.rewrite.references.reachable import without_unreachable
from plait.constrained.json_schema.rewrite.references.resources import (
    DEFINITIONS,
    ROOT,
    Resources,
    add_metaschemas,
    resolve_references,
)
from plait.constrained.specs import GrammarError

Schema: TypeAlias = dict[str, Any] | bool

MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_TEXT = 16_384  # longest listed text; forced text is tokenized again at each token

_SINGLE_SCHEMA_KEYWORDS: tuple[str, ...] = (
    "not",
    "if",
    "then",
    "else",
    "items",
    "additionalItems",
    "contains",
    "propertyNames",
    "additionalProperties",
)
_SINGLE_SCHEMA_KEYWORDS += ("unevaluatedItems", "unevaluatedProperties")
_SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
SUBSCHEMA_KEYWORDS = frozenset((*_SINGLE_SCHEMA_KEYWORDS, *_SCHEMA_LIST_KEYWORDS, *_SCHEMA_MAP_KEYWORDS))
_DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
_VALIDATORS = {
    4: jsonschema_rs.Draft4Validator,
    6: jsonschema_rs.Draft6Validator,
    7: jsonschema_rs.Draft7Validator,
    2019: jsonschema_rs.Draft201909Validator,
    2020: jsonschema_rs.Draft202012Validator,
}
_DRAFT_IDS = {
    4: jsonschema_rs.Draft4,
    6: jsonschema_rs.Draft6,
    7: jsonschema_rs.Draft7,
    2019: jsonschema_rs.Draft201909,
    2020: jsonschema_rs.Draft202012,
}


class SchemaDocument:
    """The schema in `text`. Raises GrammarError if it is not JSON, too large, or names an unknown draft.

    `resources`: pointer -> URI of parts that are resources, beside those that `$id` names; all definitions are kept
    then.

    >>> SchemaDocument('{"items": {"type": "null"}}').pointer({"type": "null"}, "/x")
    '/x'
    """

    def __init__(self, text: str, *, resources: dict[str, str] | None = None) -> None:
        self.schema: Schema = _read(text, is_whole=resources is not None)
        self._resources = resources or {}
        self.draft = draft_of(self.schema)
        self.narrowings: list[tuple[str, str]] = []  # that rules reported with `narrow`, for the rewriter to take
        self.names_beside: frozenset[str] = frozenset()  # optional ones of schemas beside the one that rules rewrite
        self._pointers: dict[int, str] = {}
        self._targets: dict[str, Schema] = {}
        self._bases: set[str] = {""}
        self.parts: list[tuple[str, dict[str, Any]]] = []  # (pointer, subschema) of all subschemas, outer ones first
        if isinstance(self.schema, dict):
            parts, added = self._parts(self.schema)
            self._index(parts)
            self._bases |= resolve_references(parts, self.draft, added, self._resources)
            if has_dynamic_references(parts):
                again = _read(text, is_whole=resources is not None)
                assert isinstance(again, dict), "it was an object before"
                static = StaticCopier(again, self._parts(again)[0], self.draft, self._resources).copy_root()
                parts = list(subschemas(static, ""))
                parts += self._referred_to(static, parts)
                self.schema = static
                self._index(parts)
                self._bases |= resolve_references(parts, self.draft)
            self.parts = parts
        self.has_counts = any(part.keys() & {"minProperties", "maxProperties"} for _, part in self.parts)
        self._registry: Any = None

    def _parts(self, schema: dict[str, Any]) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, bool]]:
        """Adds the meta-schemas that a document refers to. Returns its subschemas, and which were added."""
        parts = list(subschemas(schema, ""))
        parts += self._referred_to(schema, parts)
        added = add_metaschemas(schema, parts, self.draft)
        for uri in added:
            parts += subschemas(schema[DEFINITIONS][uri], f"/{DEFINITIONS}/{escape_pointer_token(uri)}")
        return parts, added

    def _referred_to(
        self, schema: dict[str, Any], parts: list[tuple[str, dict[str, Any]]]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Returns the subschemas that references lead to at places where the keywords expect none."""
        known, found, todo = {at for at, _ in parts}, list[tuple[str, dict[str, Any]]](), parts
        while todo:
            written = [ref for _, part in todo if isinstance(ref := part.get("$ref"), str)]
            if all(ref.startswith("#") for ref in written) and not self._resources:
                pointers = {unquote(ref[1:]) for ref in written if ref[:2] == "#/"}
            else:
                pointers = Resources(self.draft, given=self._resources).targets([*parts, *found])
            todo = []
            for pointer in sorted(pointers - known):
                try:
                    todo += subschemas(_value_at(schema, pointer, ""), pointer)
                except GrammarError:
                    continue  # refused where the reference is followed
            todo = [(at, part) for at, part in todo if at not in known]
            known |= {at for at, _ in todo}
            found += todo
        return found

    def narrow(self, values: str, keyword: str) -> None:
        """Reports that a rewrite leaves out some valid values of the schema, because of one of its keywords."""
        self.narrowings.append((values, keyword))

    def pointer(self, schema: Schema, otherwise: str) -> str:
        """Returns the pointer of `schema` (by identity); `otherwise` for a schema that a rewrite made."""
        return self._pointers.get(id(schema), otherwise)

    def resolve_reference(self, reference: object, at: str) -> Schema:
        """Returns the schema that a `$ref` refers to. Raises GrammarError at `at` if it is outside this document."""
        if not isinstance(reference, str):
            raise GrammarError("$ref must be a text", at)
        if reference not in self._targets:
            base, _, fragment = reference.removeprefix(ROOT).partition("#")
            if base not in self._bases:
                reason = f"it refers to {base[:100]!r}, and nothing is fetched; add that schema to $defs, with its $id"
                raise GrammarError(reason, at)
            self._targets[reference] = _value_at(self.schema, unquote(fragment), at)
        return self._targets[reference]

    def is_valid(self, schema: Schema, value: object) -> bool:
        """Validates `value` against `schema`, which may be part of this document; formats are asserted."""
        return bool(self.validator(schema).is_valid(value))

    def validator(self, schema: Schema) -> Any:
        """Returns a validator that asserts formats. Raises GrammarError if `schema` itself is invalid."""
        try:
            if self._registry is None:
                draft = _DRAFT_IDS[self.draft]
                self._registry = jsonschema_rs.Registry([(ROOT, self.schema)], draft=draft, retriever=_fetch_nothing)
            make = _VALIDATORS[self.draft]
            return make(schema, registry=self._registry, validate_formats=True, offline=True)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            reason = getattr(error, "message", None) or str(error)
            raise GrammarError(
                f"not a valid schema: {reason.splitlines()[0][:160]}", self.pointer(schema, "")
            ) from None

    def _index(self, parts: list[tuple[str, dict[str, Any]]]) -> None:
        self._pointers = {id(part): at for at, part in parts}
        for at, part in parts:
            for keyword in ("const", "enum"):
                if keyword in part and _longest_text(part[keyword]) > MAX_TEXT:
                    raise GrammarError(f"a text of more than {MAX_TEXT} characters", f"{at}/{keyword}")
            if at and "$id" in part and "$schema" in part and draft_of(part) != self.draft:
                raise GrammarError("a schema of another draft within this one is not supported", f"{at}/$schema")


def _value_at(schema: Schema, pointer: str, at: str) -> Schema:
    """Returns the schema at `pointer`. Raises GrammarError at `at` if there is none."""
    target: Any = schema
    if pointer and not pointer.startswith("/"):
        raise GrammarError("the reference points to nothing in the schema", at)
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdigit() and int(key) < len(target):
            target = target[int(key)]
        else:
            raise GrammarError("the reference points to nothing in the schema", at)
    if not isinstance(target, dict | bool):
        raise GrammarError("the reference points to a value that is not a schema", at)
    return target


def subschemas(schema: object, at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (pointer, schema) of `schema` and of every subschema that is an object, itself first."""
    todo: list[tuple[str, Any]] = [(at, schema)]
    while todo:
        at, part = todo.pop()
        if isinstance(part, dict):
            yield at, part
            for keyword in part.keys() & SUBSCHEMA_KEYWORDS:
                todo += inner_schemas(part, keyword, at)


def inner_schemas(part: dict[str, Any], keyword: str, at: str) -> list[tuple[str, Any]]:
    """Returns (pointer, schema) of each schema in the value of one keyword of `part`.

    >>> inner_schemas({"items": [True, {}]}, "items", "/a")
    [('/a/items/0', True), ('/a/items/1', {})]
    """
    value = part.get(keyword)
    if isinstance(value, list) and keyword in _SCHEMA_LIST_KEYWORDS:
        return [(f"{at}/{keyword}/{index}", item) for index, item in enumerate(value)]
    if isinstance(value, dict) and keyword in _SCHEMA_MAP_KEYWORDS:
        return [(f"{at}/{keyword}/{escape_pointer_token(name)}", item) for name, item in value.items()]
    return [(f"{at}/{keyword}", value)] if keyword in _SINGLE_SCHEMA_KEYWORDS and isinstance(value, dict | bool) else []


def escape_pointer_token(name: str) -> str:
    """Returns `name` escaped as one token of a JSON pointer.

    >>> escape_pointer_token("a/b")
    'a~1b'
    """
    return name.replace("~", "~0").replace("/", "~1")


def _read(text: str, *, is_whole: bool) -> Schema:
    schema = parse_json(text)
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema is an object, true or false", "")
    reachable: Schema = without_unreachable(schema) if isinstance(schema, dict) and not is_whole else schema
    _check_size(reachable)
    return reachable


def parse_json(text: str) -> Any:
    """Returns the value of the JSON text of a schema. Raises GrammarError, also for a name that stands twice.

    >>> parse_json('{"type": "null"}')
    {'type': 'null'}
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply", "") from None
    except json.JSONDecodeError as error:
        raise GrammarError(f"the schema is not JSON: {error.msg}", error.pos) from None
    except ValueError:
        raise GrammarError("the schema holds a number that is too long") from None


def _check_size(schema: Schema) -> None:
    level, nodes = [schema], 0
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise GrammarError(f"the schema has more than {MAX_NODES} parts", "")
        level = [
            inner
            for part in level
            for inner in (part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
        ]
        if any(isinstance(part, float) and part in (float("inf"), float("-inf")) for part in level):
            raise GrammarError("the schema holds a number that is too large", "")
        if not level:
            return
    raise GrammarError(f"the schema is nested more than {MAX_DEPTH} deep", "")


def _no_constant(name: str) -> NoReturn:
    raise GrammarError(f"the schema is not JSON: {name}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise GrammarError(f"the schema names {repeated[:50]!r} twice in one object")
    return members


def draft_of(schema: Schema, otherwise: int = 2020) -> int:
    """Returns the draft that a schema names; `otherwise` if it names none. Raises GrammarError for an unknown one.

    >>> draft_of({"$schema": "http://json-schema.org/draft-07/schema#"}), draft_of(True)
    (7, 2020)
    """
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if uri is None:
        return otherwise
    for name, draft in _DRAFTS.items():
        if isinstance(uri, str) and re.search(rf"json-schema\.org/(draft/)?{name}/", uri) and draft > 3:
            return draft
    if isinstance(uri, str) and re.fullmatch(r"https?://json-schema\.org/schema#?", uri):
        return 2020
    raise GrammarError("this draft of JSON Schema is not known", "/$schema")


def _fetch_nothing(address: str) -> NoReturn:
    raise ValueError("nothing is fetched")


def _longest_text(value: object) -> int:
    """Returns the number of characters of the longest text in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max((max(len(name), _longest_text(item)) for name, item in value.items()), default=0)
    return max(map(_longest_text, value), default=0) if isinstance(value, list) else 0
