"""Rewrite rules for `oneOf`, `not` and `if`."""

from __future__ import annotations

from itertools import combinations

from plait.constrained.json_schema.rewrite.analysis import (
    FRACTIONS,
    KINDS,
    are_disjoint,
    discriminators,
    holds_for_kind,
)
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, with_all_of, without_keywords
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.negation.complement import negate, subtract
from plait.constrained.json_schema.rewrite.negation.simple_keywords import negate_pattern
from plait.constrained.json_schema.rewrite.patterns.operations import is_narrowed

MAX_BRANCHES = 64
MAX_EXCLUDED = 6
MIN_JOINED = 8  # forbidden patterns; fewer are not joined


def one_of(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `oneOf` by `anyOf` if the branches are disjoint; otherwise each branch excludes the others.

    Proof: a value is valid by exactly one branch if it is valid by some branch and by no other. If the branches are
    disjoint, the second condition always holds. Otherwise it is added: each branch is combined with the complements of
    the branches that it is not proved disjoint from. OpenAPI's `discriminator` names a property by which the branches
    differ; it is required then, which leaves out objects without it.

    Of types that two branches allow whatever the value, as those that only speak of objects allow texts, none is valid.

    >>> one_of({"oneOf": [{"type": "null"}, {"type": "string"}]}, SchemaDocument("{}"))
    {'allOf': [{'anyOf': [{'type': 'null'}, {'type': 'string'}]}]}
    """
    if "oneOf" not in schema:
        return _one_of_in_all_of(schema, document)
    return _without_one_of(schema, document, [])


def _one_of_in_all_of(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Rewrites `oneOf` of the conjuncts, whose branches may be disjoint because of the schemas beside them."""
    inner = schema.get("allOf", [])
    rewritten: list[Schema] = []
    for at, part in enumerate(inner):
        beside = [without_keywords(schema, "allOf"), *inner[:at], *inner[at + 1 :]]
        num_narrowings = len(document.narrowings)
        try:
            is_one_of = isinstance(part, dict) and "oneOf" in part
            rewritten.append(_without_one_of(part, document, beside) if is_one_of else part)
        except UnsupportedKeywords:
            del document.narrowings[num_narrowings:]
            rewritten.append(part)
    return (
        {**schema, "allOf": rewritten}
        if inner and any(a is not b for a, b in zip(inner, rewritten, strict=True))
        else None
    )


def _without_one_of(schema: SchemaObject, document: SchemaDocument, beside: list[Schema]) -> SchemaObject:
    """Returns the schema without `oneOf`; all of its values that matter match `beside` too."""
    rest = without_keywords(schema, "oneOf")
    branches = [_with_names(branch, rest) for branch in schema["oneOf"]]
    if len(branches) == 1:
        return with_all_of(rest, branches[0])
    types = _types_of_one(branches, document)
    if types == []:
        return with_all_of(rest, False)
    if types is not None:
        branches = [{"allOf": [branch, {"type": types}]} for branch in branches]
    if discriminators(branches, document):
        return with_all_of(rest, {"anyOf": branches})
    named = rest.pop("discriminator", None)
    named = named.get("propertyName") if isinstance(named, dict) else None
    if isinstance(named, str) and discriminators(branches, document, named):
        present = {"required": [named]}
        document.narrow(f"objects without the discriminator {named[:50]!r} are left out", "oneOf")
        return with_all_of(rest, {"anyOf": [{"allOf": [branch, present]} for branch in branches]})
    if len(branches) > MAX_BRANCHES:
        raise UnsupportedKeywords(f"more than {MAX_BRANCHES} branches are not compared", "oneOf")
    outer = [rest, *beside]
    shared: list[set[int]] = [set() for _ in branches]
    for i, j in combinations(range(len(branches)), 2):
        if not are_disjoint({"allOf": [branches[i], *outer]}, branches[j], document):
            shared[i].add(j)
            shared[j].add(i)
    if not any(shared):
        return with_all_of(rest, {"anyOf": branches})
    return with_all_of(
        rest, {"anyOf": [_exclusive_branch(branches, i, shared[i], outer, document) for i in range(len(branches))]}
    )


def _types_of_one(branches: list[Schema], document: SchemaDocument) -> list[str] | str | None:
    """Returns the types without those of which two branches allow all values, as they do if they forget `type`.

    None: there is no such type.
    """
    kinds = {kind for kind in KINDS if sum(holds_for_kind(kind, branch, document) for branch in branches) < 2}
    if "fraction" in kinds:
        kinds = kinds - {"fraction", "integer"} | {"number"}  # an integer fails then in each branch
    if len(kinds) == len(KINDS) - ("number" in kinds):
        return None
    return sorted(kinds) if len(kinds) != 1 else next(iter(kinds))


def _with_names(branch: Schema, outer: SchemaObject) -> Schema:
    """Returns a branch that counts properties together with their names, if the schema around it lists all of them."""
    if isinstance(branch, bool) or outer.get("additionalProperties") is not False or outer.get("patternProperties"):
        return branch
    has_names = branch.keys() & {"properties", "patternProperties", "additionalProperties"}
    if has_names or not branch.keys() & {"minProperties", "maxProperties"}:
        return branch
    return {**branch, "properties": dict.fromkeys(outer.get("properties", {}), True), "additionalProperties": False}


def _exclusive_branch(
    branches: list[Schema], index: int, shared: set[int], outer: list[Schema], document: SchemaDocument
) -> SchemaObject:
    if len(shared) > MAX_EXCLUDED:
        raise UnsupportedKeywords("its branches are not proved to exclude each other", "oneOf")
    complements = []
    for j in sorted(shared):
        complement, is_exact = subtract([branches[index], *outer], branches[j], document)
        if complement is None:
            raise UnsupportedKeywords(f"its branches {min(index, j)} and {max(index, j)} may share values", "oneOf")
        if not is_exact:
            document.narrow("values are left out that violate another branch only by what has no complement", "")
        complements.append(complement)
    return {"allOf": [branches[index], *complements]}


def not_patterns(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Joins conjuncts of which each forbids a pattern: a text that matches none does not match their alternative.

    The complements of many patterns, one by one, would be too much for llguidance together.

    >>> not_patterns({"allOf": [{"not": {"pattern": f"^{c}$"}} for c in "abcdefgh"]}, SchemaDocument("{}"))
    {'allOf': [{'not': {'pattern': '(?:^a$)|(?:^b$)|(?:^c$)|(?:^d$)|(?:^e$)|(?:^f$)|(?:^g$)|(?:^h$)'}}]}
    """
    inner = schema.get("allOf", [])
    forbidding = [part for part in inner if _is_not_pattern(part)]
    if len(forbidding) < MIN_JOINED:
        return None
    joined = "|".join(f"(?:{part['not']['pattern']})" for part in forbidding)
    if negate_pattern(joined) is None:
        return None
    return {**schema, "allOf": [*(part for part in inner if not _is_not_pattern(part)), {"not": {"pattern": joined}}]}


def _is_not_pattern(schema: Schema) -> bool:
    inner = schema.get("not") if isinstance(schema, dict) and len(schema) == 1 else None
    return isinstance(inner, dict) and inner.keys() == {"pattern"} and not is_narrowed(inner["pattern"])


def not_(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `not` by the complement of its schema, if that can be written without `not`.

    Proof: by the definition of the complement; see negation.py.

    >>> not_({"not": {"required": ["a"]}}, SchemaDocument("{}"))
    {'allOf': [{'anyOf': [{'type': ['object'], 'properties': {'a': False}}]}]}
    """
    if "not" not in schema or schema.items() >= FRACTIONS.items():
        return None
    rest, inner = without_keywords(schema, "not"), schema["not"]
    if "type" in schema and are_disjoint({"type": schema["type"]}, inner, document):
        return rest
    complement = negate(inner, document)
    if complement is None:
        raise UnsupportedKeywords("this schema has no complement that can be written without not", "not")
    return with_all_of(rest, complement)


def if_(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `if` C `then` T `else` E by: C and T, or not C and E.

    Proof: each value is valid by C or by its complement and never by both; the first case requires T, the second
    E; a missing T or E requires nothing. `then` and `else` without `if` have no effect. If C has no complement that can
    be written, or only part of it, there is a case for T and E, which is valid whether C holds or not; left out are the
    values outside of that part that match E but neither C nor T.

    >>> if_({"if": {"required": ["a"]}, "then": False}, SchemaDocument("{}"))
    {'allOf': [{'anyOf': [{'anyOf': [{'type': ['object'], 'properties': {'a': False}}]}]}]}
    """
    if not {"if", "then", "else"} & schema.keys():
        return None
    rest = without_keywords(schema, "if", "then", "else")
    if "if" not in schema or ("then" not in schema and "else" not in schema):
        return rest
    condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
    negation, is_exact = subtract([rest], condition, document)
    shared: list[Schema] = []
    if not is_exact:
        shared = [{"allOf": [then, otherwise]}]
        document.narrow("values that violate both the condition and then (or else) may be left out", "if")
    if negation is None and (then is False or otherwise is False):
        raise UnsupportedKeywords(
            "the condition has no complement that can be written without not", "if", "then", "else"
        )
    cases = shared if then is not False and otherwise is not False else []
    if then is not False:
        cases.append({"allOf": [condition, then]} if then is not True else condition)
    if otherwise is not False and negation is not None:
        cases.append({"allOf": [negation, otherwise]} if otherwise is not True else negation)
    return with_all_of(rest, {"anyOf": cases} if cases else False)
