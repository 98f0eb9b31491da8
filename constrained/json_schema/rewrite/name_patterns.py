"""Patterns of `patternProperties` that may match the same name, as patterns and names that exclude each other."""

from __future__ import annotations

from plait.constrained.json_schema.rewrite.base import SchemaObject
from plait.constrained.json_schema.rewrite.document import Schema
from plait.constrained.json_schema.rewrite.patterns import ecma_to_plain_pattern, finite_texts, is_narrowed
from plait.constrained.regex.automaton_writer import NO_TEXT
from plait.constrained.regex.pattern_algebra import intersect
from plait.constrained.specs import GrammarError

MAX_PATTERNS = 24  # disjoint patterns that replace overlapping ones
_OF_NAMES = ("properties", "patternProperties", "additionalProperties")


def check_complements(schema: SchemaObject) -> None:
    """Raises GrammarError if the rewrite needs the complement of a pattern whose complement is not known."""
    patterns, is_open = schema["patternProperties"], schema.get("additionalProperties", True) is not False
    if any(map(is_narrowed, patterns)) and (is_open or len(patterns) > 1 or schema.get("properties")):
        raise GrammarError(
            "Unicode properties and word boundaries are supported in the only pattern of a closed object"
        )


def list_finite_names(schema: SchemaObject) -> SchemaObject | None:
    """Returns the schema of an object with the names of patterns that match a few texts as properties; None if there
    are none. Such names then come in the order of the properties."""
    named, patterns = dict(schema.get("properties", {})), dict[str, Schema]()
    for pattern, inner in schema["patternProperties"].items():
        texts = None if is_narrowed(pattern) else finite_texts(ecma_to_plain_pattern(pattern).pattern)
        if texts is None:
            patterns[pattern] = inner
        for text in texts or ():
            named[text] = {"allOf": [named[text], inner]} if text in named else inner
    if len(patterns) == len(schema["patternProperties"]):
        return None
    kept = {name: value for name, value in schema.items() if name in _OF_NAMES}
    return {**kept, "properties": named, "patternProperties": patterns}


def separate_patterns(patterns: dict[str, Schema]) -> dict[str, Schema]:
    """Replaces patterns that overlap by disjoint ones. The schema for names that two of them match requires both.

    Raises GrammarError if the automata or the number of patterns become too large.
    """
    separate: list[tuple[str, Schema]] = []
    for pattern, inner in patterns.items():
        rest = pattern[4:-2]
        for known, schema in list(separate):
            both = intersect(known, rest).pattern
            if both != NO_TEXT:
                separate.remove((known, schema))
                either = False if schema is False or inner is False else {"allOf": [schema, inner]}
                separate += [(both, either), (intersect(known, rest, negated=True).pattern, schema)]
                rest = intersect(rest, known, negated=True).pattern
        separate.append((rest, inner))
        separate = [(plain, schema) for plain, schema in separate if plain != NO_TEXT]
        if len(separate) > MAX_PATTERNS:
            raise GrammarError("its patterns overlap in too many ways")
    return {f"^(?:{plain})$": schema for plain, schema in separate}


def merge_patterns(patterns: dict[str, Schema]) -> dict[str, Schema]:
    """Joins patterns with equal schemas into one pattern, because patterns may not overlap."""
    groups: dict[str, tuple[list[str], Schema]] = {}
    for pattern, inner in patterns.items():
        groups.setdefault(repr(inner), ([], inner))[0].append(pattern[1:-1])
    return {f"^(?:{'|'.join(group)})$": inner for group, inner in groups.values()}
