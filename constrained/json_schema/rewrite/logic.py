"""Rewrite rules for `oneOf`, `not` and `if`."""

from __future__ import annotations

from itertools import combinations

from plait.constrained.json_schema.rewrite.analysis import are_disjoint
from plait.constrained.json_schema.rewrite.base import SchemaObject, UnsupportedKeywords, with_all_of, without_keywords
from plait.constrained.json_schema.rewrite.document import SchemaDocument
from plait.constrained.json_schema.rewrite.negation import negate

MAX_BRANCHES = 64
MAX_EXCLUDED = 6


def one_of(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `oneOf` by `anyOf` if the branches are disjoint; otherwise each branch excludes the others.

    Proof: a value is valid by exactly one branch if it is valid by some branch and by no other. Where no two
    share a value, the second half is met by itself. Otherwise it is said: the branch and the complements of
    those that it is not proved disjoint from.

    >>> one_of({"oneOf": [{"type": "null"}, {"type": "string"}]}, Document("{}"))
    {'allOf': [{'anyOf': [{'type': 'null'}, {'type': 'string'}]}]}
    """
    if "oneOf" not in schema:
        return None
    branches = schema["oneOf"]
    rest = without_keywords(schema, "oneOf")
    if len(branches) == 1:
        return with_all_of(rest, branches[0])
    if len(branches) > MAX_BRANCHES:
        raise UnsupportedKeywords(f"more than {MAX_BRANCHES} branches are not compared", "oneOf")
    outer = {name: rest[name] for name in ("type",) if name in rest}
    shared: list[set[int]] = [set() for _ in branches]
    for i, j in combinations(range(len(branches)), 2):
        if not are_disjoint({**outer, "allOf": [branches[i]]}, branches[j], document):
            shared[i].add(j)
            shared[j].add(i)
    if not any(shared):
        return with_all_of(rest, {"anyOf": branches})
    return with_all_of(
        rest, {"anyOf": [_exclusive_branch(branches, i, shared[i], document) for i in range(len(branches))]}
    )


def _exclusive_branch(
    branches: list[SchemaObject], index: int, shared: set[int], document: SchemaDocument
) -> SchemaObject:
    if len(shared) > MAX_EXCLUDED:
        raise UnsupportedKeywords("its branches are not proved to exclude each other", "oneOf")
    others = []
    for j in sorted(shared):
        other = negate(branches[j], document)
        if other is None:
            raise UnsupportedKeywords(f"its branches {min(index, j)} and {max(index, j)} may share values", "oneOf")
        others.append(other)
    return {"allOf": [branches[index], *others]}


def not_(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `not` by the complement of its schema, if that can be written without `not`.

    Proof: by the definition of the complement; see negate.py.

    >>> not_({"not": {"required": ["a"]}}, Document("{}"))
    {'allOf': [{'anyOf': [{'type': ['object'], 'properties': {'a': False}}]}]}
    """
    if "not" not in schema:
        return None
    rest, inner = without_keywords(schema, "not"), schema["not"]
    if "type" in schema and are_disjoint({"type": schema["type"]}, inner, document):
        return rest
    other = negate(inner, document)
    if other is None:
        raise UnsupportedKeywords("this schema has no complement that can be written without not", "not")
    return with_all_of(rest, other)


def if_(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Replaces `if` C `then` T `else` E by: C and T, or not C and E.

    Proof: each value is valid by C or by its complement and never by both; in the first case T is demanded, in
    the second E; a missing T or E demands nothing. `then` and `else` without `if` demand nothing at all.

    >>> if_({"if": {"required": ["a"]}, "then": False}, Document("{}"))
    {'allOf': [{'anyOf': [{'anyOf': [{'type': ['object'], 'properties': {'a': False}}]}]}]}
    """
    if not {"if", "then", "else"} & schema.keys():
        return None
    rest = without_keywords(schema, "if", "then", "else")
    if "if" not in schema or ("then" not in schema and "else" not in schema):
        return rest
    condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
    failing = negate(condition, document)
    if failing is None:
        raise UnsupportedKeywords(
            "the condition has no complement that can be written without not", "if", "then", "else"
        )
    cases = []
    if then is not False:
        cases.append({"allOf": [condition, then]} if then is not True else condition)
    if otherwise is not False:
        cases.append({"allOf": [failing, otherwise]} if otherwise is not True else failing)
    return with_all_of(rest, {"anyOf": cases} if cases else False)
