"""Rewrites a schema: applies the rewrite rules to each subschema and emits only keywords that the compiler supports.

The target of each `$ref` becomes a definition that is rewritten once, so recursive schemas end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from plait.constrained.json_schema.rewrite.arrays import contains, unique_items
from plait.constrained.json_schema.rewrite.base import RewriteRule, SchemaObject, UnsupportedKeywords, refusal
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument, escape_pointer_token
from plait.constrained.json_schema.rewrite.enums import check_enum_texts, fold_enum, listed_schema, upgrade_draft
from plait.constrained.json_schema.rewrite.formats import FORMATS
from plait.constrained.json_schema.rewrite.keywords import (
    ANNOTATIONS,
    ASSERTIONS,
    COUNTS,
    UNSUPPORTED,
    check_keyword_value,
    unknown_keyword_reason,
)
from plait.constrained.json_schema.rewrite.logic import if_, not_, not_patterns, one_of
from plait.constrained.json_schema.rewrite.name_patterns import (
    check_complements,
    list_finite_names,
    list_other_names,
    merge_patterns,
    separate_patterns,
)
from plait.constrained.json_schema.rewrite.objects import (
    Beside,
    count_properties,
    dependent_required,
    dependent_schemas,
    has_counts,
)
from plait.constrained.json_schema.rewrite.patterns.conversion import ecma_to_plain_pattern, ecma_to_plain_patterns
from plait.constrained.json_schema.rewrite.patterns.operations import are_disjoint, is_narrowed, matches
from plait.constrained.json_schema.rewrite.property_names import property_names
from plait.constrained.json_schema.rewrite.unevaluated import unevaluated_items, unevaluated_properties
from plait.constrained.specs import GrammarError

REWRITE_RULES: tuple[tuple[RewriteRule, frozenset[str]], ...] = tuple(
    (rule, frozenset(keywords.split()))
    for rule, keywords in (
        (fold_enum, "enum const type"),  # before upgrade_draft, since it validates by the document's own draft
        (unique_items, "uniqueItems"),
        (fold_enum, "enum const type"),
        (upgrade_draft, "items additionalItems exclusiveMinimum exclusiveMaximum dependencies"),
        (unevaluated_properties, "unevaluatedProperties"),
        (unevaluated_items, "unevaluatedItems"),
        (one_of, "oneOf allOf"),
        (not_patterns, "allOf"),
        (not_, "not"),
        (if_, "if then else"),
        (dependent_required, "dependentRequired"),
        (dependent_schemas, "dependentSchemas"),
        (property_names, "propertyNames"),
        (list_other_names, "patternProperties"),
        (contains, "contains minContains maxContains"),
        (count_properties, "minProperties maxProperties"),
    )
)
"""The rules, in order, with the keywords without which a rule changes nothing."""

MAX_PARTS = 50_000  # subschemas that are rewritten, each as often as it is used
MAX_NESTING = 400
MAX_WARNINGS = 16
_COPIED_KEYWORDS = (
    *("type", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems", "required", "minProperties", "maxProperties", "uniqueItems"),
)


@dataclass(frozen=True)
class RewrittenSchema:
    """The result of a rewrite.

    schema: an equivalent schema in the compiler's keywords.
    unchecked: the JSON pointers of the keywords that `lenient` dropped.
    warnings: one sentence for each unknown format, each keyword because of which valid values are left out and, with
    `annotations`, each probable misspelling.
    """

    schema: SchemaObject
    unchecked: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def rewrite_schema(
    text: str,
    *,
    annotations: bool = False,
    lenient: bool = False,
    strict_formats: bool = False,
) -> RewrittenSchema:
    """Rewrites the schema `text`, which is JSON, in the compiler's keywords and `uniqueItems`.

    annotations: treat unknown keywords as annotations. lenient: drop keywords without an equivalent, and do not raise.
    strict_formats: treat an unknown format like a keyword without an equivalent, instead of warning.

    Raises GrammarError with the JSON pointer of a keyword that has no equivalent.

    >>> rewrite_schema('{"oneOf": [{"type": "null"}, {"const": 3}]}').schema
    {'anyOf': [{'enum': [None]}, {'enum': [3]}]}
    """
    with _bounded_recursion():
        document = SchemaDocument(text)
        return _Rewriter(document, annotations, lenient, strict_formats).rewrite_document()


def rewrite_subschema(document: SchemaDocument, schema: Schema, at: str) -> Schema:
    """Rewrites a schema that is part of `document`, or built from its parts. Always lenient.

    >>> rewrite_subschema(SchemaDocument("{}"), {"const": 3}, "")
    {'enum': [3]}
    """
    with _bounded_recursion():
        return _Rewriter(document, annotations=True, lenient=True).rewrite_part(schema, at)


@contextmanager
def _bounded_recursion() -> Iterator[None]:
    """Raises GrammarError instead of RecursionError."""
    try:
        yield
    except RecursionError:
        raise GrammarError("its references lead through too many schemas, one within another", "") from None


class _Rewriter:
    """Rewrites one document. The argument `at` of its methods is the JSON pointer of the schema, for error texts."""

    def __init__(
        self, document: SchemaDocument, annotations: bool, lenient: bool, strict_formats: bool = False
    ) -> None:
        self._document, self._annotations, self._lenient = document, annotations, lenient
        self._strict_formats = strict_formats
        self._warnings: dict[str, str] = {}  # JSON pointer -> what has no effect there
        self._unchecked: dict[str, None] = {}  # JSON pointers of dropped keywords, in order
        self._definitions: dict[str, Schema] = {}  # the `$defs` of the result
        self._names: dict[tuple[int, frozenset[str]], str] = {}  # `$ref` target's id, names beside -> name in `$defs`
        self._counted: dict[int, bool] = {}  # id of a `$ref` target -> whether it counts properties
        self._parts = self._nesting = 0

    def rewrite_document(self) -> RewrittenSchema:
        for at, part in self._document.parts:
            self._check_keywords(part, at)
        schema = self._schema(self._document.schema, "", Beside())
        if schema is False:
            raise GrammarError(refusal("no value satisfies this schema", self._warnings.values()), "")
        body: SchemaObject = {} if schema is True else dict(schema)
        if self._definitions:
            body["$defs"] = self._definitions
        return RewrittenSchema(body, tuple(self._unchecked), self._warnings_listed())

    def _warnings_listed(self) -> tuple[str, ...]:
        listed = list(self._warnings.values())
        num_more = len(listed) - MAX_WARNINGS
        return (*listed[:MAX_WARNINGS], f"{num_more} more like these") if num_more > 0 else tuple(listed)

    def rewrite_part(self, schema: Schema, at: str) -> Schema:
        """Returns one part, rewritten, with the definitions that it needs."""
        rewritten = self._schema(schema, at, Beside())
        if not self._definitions or not isinstance(rewritten, dict):
            return rewritten
        return {**rewritten, "$defs": self._definitions}

    def _check_keywords(self, part: SchemaObject, at: str) -> None:
        """Rejects or drops unknown and unsupported keywords, and checks the values of the others."""
        for name in list(part):
            if name in ASSERTIONS:
                check_keyword_value(name, part[name], at)
                if name == "format" and part[name] not in FORMATS:
                    if self._strict_formats:
                        self._reject_or_drop(f"the format {part[name][:40]!r} is not known", at, part, name)
                    else:
                        place = f"{at}/format"[:200]
                        self._warnings[place] = (
                            f"the format {part[name][:40]!r} at {place} is not known, so it is not enforced"
                        )
            elif name in UNSUPPORTED:
                self._reject_or_drop(UNSUPPORTED[name], at, part, name)
            elif name not in ANNOTATIONS:
                reason = unknown_keyword_reason(name, part[name])
                if reason is not None and not self._annotations:
                    self._reject_or_drop(reason, at, part, name)
                elif reason is not None:
                    place = f"{at}/{escape_pointer_token(name)}"[:200]
                    self._warnings[place] = f"{place} has no effect: {reason}"

    def _reject_or_drop(self, reason: str, at: str, part: SchemaObject, *names: str) -> None:
        """Raises GrammarError; with `lenient`, removes `names` from `part` and records their pointers instead."""
        if not self._lenient:
            raise GrammarError(reason[:200], f"{at}/{names[0] if '/' in names[0] else escape_pointer_token(names[0])}")
        for name in names:
            if name in part:
                del part[name]
                self._unchecked[f"{at}/{escape_pointer_token(name)}"] = None

    def _schema(self, schema: Schema, at: str, beside: Beside) -> Schema:
        """Returns the rewritten schema."""
        at = self._document.pointer(schema, at)
        if isinstance(schema, bool):
            return schema
        self._parts += 1
        self._nesting += 1
        if self._parts > MAX_PARTS or self._nesting > MAX_NESTING:
            raise GrammarError("with its references expanded, the schema is too large", at)
        rewritten: SchemaObject = {
            name: value for name, value in schema.items() if name in ASSERTIONS or name == "discriminator"
        }
        for rule, keywords in REWRITE_RULES:
            if not keywords.isdisjoint(rewritten):
                self._document.names_beside = beside.names
                rewritten = self._apply_rule(rule, rewritten, at)
        emitted = self._emit(rewritten, at, beside)
        self._nesting -= 1
        return emitted

    def _apply_rule(self, rewrite: RewriteRule, schema: SchemaObject, at: str) -> SchemaObject:
        """Applies a rule; with `lenient`, again after each drop of keywords that it does not support."""
        for _ in range(len(schema) + 1):
            try:
                rewritten = rewrite(schema, self._document)
                self._warn_of_narrowings(at)
                return schema if rewritten is None else rewritten
            except UnsupportedKeywords as error:
                self._document.narrowings.clear()
                schema = dict(schema)
                named = [name for name in error.keywords if name in schema]
                if not named:
                    named = [error.keywords[0].partition("/")[0]]
                if not self._lenient:
                    raise GrammarError(error.reason, f"{at}/{error.keywords[0]}") from None
                self._reject_or_drop(error.reason, at, schema, *named)
        return schema

    def _warn_of_narrowings(self, at: str) -> None:
        for values, keyword in self._document.narrowings:
            place = f"{at}/{keyword}".rstrip("/")[:200]
            self._warnings[f"{place} {values}"] = f"at {place or 'the top'} {values}"
        self._document.narrowings.clear()

    def _emit(self, schema: SchemaObject, at: str, beside: Beside) -> Schema:
        """Returns a schema, to which all rules were applied, in the compiler's keywords."""
        if "enum" in schema and not schema["enum"]:
            return False
        out: SchemaObject = {
            name: int(schema[name]) if name in COUNTS else schema[name] for name in _COPIED_KEYWORDS if name in schema
        }
        if "not" in schema:
            out["type"] = "fraction"
        conjuncts: list[Schema] = []
        if "enum" in schema:
            conjuncts.append(self._enum(schema, at))
        conjuncts += self._string_patterns(schema, at)
        self._object_and_array_parts(schema, out, at)
        if "$ref" in schema:
            conjuncts.append(self._reference(schema["$ref"], at, beside.and_names_of(self._document, schema, "$ref")))
        if "allOf" in schema:
            inner = beside.and_names_of(self._document, schema)
            conjuncts += [self._schema(one, f"{at}/allOf/{i}", inner) for i, one in enumerate(schema["allOf"])]
        if "anyOf" in schema:
            conjuncts.append(self._any_of(schema["anyOf"], at, beside.and_names_of(self._document, schema, "anyOf")))
        if any(conjunct is False for conjunct in conjuncts):
            return False
        conjuncts = [conjunct for conjunct in conjuncts if conjunct is not True and conjunct != {}]
        if not out and len(conjuncts) == 1:
            return conjuncts[0]
        return {**out, "allOf": conjuncts} if conjuncts else out

    def _enum(self, schema: SchemaObject, at: str) -> Schema:
        try:
            check_enum_texts(schema["enum"])
        except UnsupportedKeywords as error:
            self._reject_or_drop(error.reason, at, dict(schema), "enum")
            return True
        return listed_schema(schema["enum"])

    def _any_of(self, branches: list[Schema], at: str, beside: Beside) -> Schema:
        rewritten = [self._schema(inner, f"{at}/anyOf/{i}", beside) for i, inner in enumerate(branches)]
        if any(branch is True or branch == {} for branch in rewritten):
            return True
        rewritten = [branch for branch in rewritten if branch is not False]
        return {"anyOf": rewritten} if len(rewritten) > 1 else rewritten[0] if rewritten else False

    def _string_patterns(self, schema: SchemaObject, at: str) -> list[Schema]:
        """Returns schemas with the patterns for `pattern` and `format`, anchored at both ends."""
        patterns: list[Schema] = []
        for name in ("pattern", "format"):
            if name not in schema or (name == "format" and schema[name] not in FORMATS):
                continue
            pattern = schema[name] if name == "pattern" else f"^(?:{FORMATS[schema[name]]})$"
            if name == "pattern" and is_narrowed(pattern):
                self._document.narrow(
                    "texts with characters beyond ASCII next to \\b, or unknown to \\p, are left out", name
                )
                self._warn_of_narrowings(at)
            try:
                patterns += [{"pattern": f"^(?:{plain.pattern})$"} for plain in ecma_to_plain_patterns(pattern)]
            except GrammarError as error:
                self._reject_or_drop(error.reason, at, dict(schema), name)
        return patterns

    def _object_and_array_parts(self, schema: SchemaObject, out: SchemaObject, at: str) -> None:
        """Rewrites the schemas of an object's properties and an array's items."""
        nothing = Beside()
        for name in ("items", "additionalProperties"):
            if name in schema:
                out[name] = self._schema(schema[name], f"{at}/{name}", nothing)
        if "prefixItems" in schema:
            listed = enumerate(schema["prefixItems"])
            out["prefixItems"] = [self._schema(inner, f"{at}/prefixItems/{i}", nothing) for i, inner in listed]
        if "properties" in schema:
            named = schema["properties"].items()
            out["properties"] = {
                n: self._schema(s, f"{at}/properties/{escape_pointer_token(n)}", nothing) for n, s in named
            }
        if schema.get("patternProperties"):
            self._pattern_properties(schema, out, at)

    def _pattern_properties(self, schema: SchemaObject, out: SchemaObject, at: str) -> None:
        """Rewrites patternProperties to disjoint patterns, anchored at both ends.

        The schemas of patterns that match a name in `properties` are added to that property instead. Patterns of a few
        names become such names: where all of them were listed, here or beside, llguidance would expect another one.
        Where the document counts properties they stay patterns, since llguidance counts no optional names.
        """
        listed = None if self._document.has_counts else list_finite_names(schema)
        if listed is not None:
            self._object_and_array_parts(listed, out, at)
            return
        rewritten: dict[str, Schema] = {}
        try:
            check_complements(schema)
            for pattern, inner in schema["patternProperties"].items():
                plain = ecma_to_plain_pattern(pattern).pattern
                rewritten[f"^(?:{plain})$"] = self._schema(
                    inner, f"{at}/patternProperties/{escape_pointer_token(pattern)}", Beside()
                )
            self._apply_patterns_to_names(schema, out, at)
            if any(
                inner != other_inner and not are_disjoint(pattern[4:-2], other_pattern[4:-2])
                for (pattern, inner), (other_pattern, other_inner) in combinations(rewritten.items(), 2)
            ):
                try:
                    rewritten = separate_patterns(rewritten)
                except GrammarError:
                    listed = list_finite_names(schema)
                    if listed is None:
                        raise
                    self._object_and_array_parts(listed, out, at)
                    return
        except (GrammarError, UnsupportedKeywords) as error:
            if isinstance(error, GrammarError) and isinstance(error.where, str):
                raise
            self._reject_or_drop(error.reason, at, dict(schema), "patternProperties")
            return
        if len({repr(inner) for inner in rewritten.values()}) < len(rewritten):
            rewritten = merge_patterns(rewritten)
        out["patternProperties"] = rewritten

    def _apply_patterns_to_names(self, schema: SchemaObject, out: SchemaObject, at: str) -> None:
        """Adds to each property in `out` the schemas of the patterns that match its name."""
        for name, inner in list(out.get("properties", {}).items()):
            for pattern, pattern_schema in schema["patternProperties"].items():
                if matches(pattern, name):
                    pointer = f"{at}/patternProperties/{escape_pointer_token(pattern)}"
                    more = self._schema(pattern_schema, pointer, Beside())
                    inner = False if inner is False or more is False else {"allOf": [inner, more]}
                    out["properties"][name] = inner

    def _reference(self, reference: Any, at: str, beside: Beside) -> Schema:
        target = self._document.resolve_reference(reference, f"{at}/$ref")
        if isinstance(target, bool):
            return target
        if id(target) in beside.references:
            raise GrammarError("the reference leads back to itself for the same value", f"{at}/$ref")
        if id(target) not in self._counted:
            self._counted[id(target)] = has_counts(target, self._document)
        names = beside.names if self._counted[id(target)] else frozenset()
        name = self._names.get((id(target), names))
        if name is None:
            name = self._names[id(target), names] = f"d{len(self._names)}"
            self._definitions[name] = True
            self._definitions[name] = self._schema(target, at, Beside(beside.references | {id(target)}, names))
        return {"$ref": f"#/$defs/{name}"}
