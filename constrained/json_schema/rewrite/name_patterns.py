"""Patterns of `patternProperties` that may match the same name, as patterns and names that exclude each other."""

from __future__ import annotations

from plait.constrained.json_schema.rewrite.base import SchemaObject, without_keywords
from plait.constrained.json_schema.rewrite.document import Schema, SchemaDocument
from plait.constrained.json_schema.rewrite.patterns.conversion import ANY, ecma_to_plain_pattern
from plait.constrained.json_schema.rewrite.patterns.operations import finite_texts, is_narrowed, matches
from plait.constrained.regex.automaton_writer import NO_TEXT
from plait.constrained.regex.char_classes import merge_ranges, write_class
from plait.constrained.regex.pattern_algebra import intersect
from plait.constrained.specs import GrammarError

MAX_PATTERNS = 24  # disjoint patterns that replace overlapping ones
_IN_LINE = write_class(merge_ranges([(10, 10), (13, 13), (0x2028, 0x2029)], negated=True))
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


def list_other_names(schema: SchemaObject, document: SchemaDocument) -> SchemaObject | None:
    """Lists the names that a pattern such as ^(?!a$).* excludes; its schema is then that of additional properties.

    Proof: without `additionalProperties`, any value is valid for a name that the pattern does not match. Such names are
    listed; if they are more than a few because they may have line breaks, those that have are narrowed to the schema
    of the pattern. No name may count as evaluated that did not before, so it is not applied beside `unevaluated...`.

    >>> list_other_names({"patternProperties": {"^(?!a$)": {"type": "null"}}}, SchemaDocument("{}"))
    {'properties': {'a': True}, 'additionalProperties': {'type': 'null'}}
    """
    (pattern, inner), *others = schema.get("patternProperties", {}).items() or [("", True)]
    is_closed = schema.get("additionalProperties", True) not in (True, {})
    if others or is_closed or not pattern.startswith("^(?!") or is_narrowed(pattern):
        return None
    if any("unevaluatedProperties" in part for _, part in document.parts):
        return None
    try:
        plain = ecma_to_plain_pattern(pattern).pattern
        names, all_names = (
            finite_texts(intersect(f"{char}*", plain, negated=True).pattern) for char in (_IN_LINE, ANY)
        )
    except GrammarError:
        return None
    if names is None:
        return None
    if all_names is None:
        document.narrow("other values of names with line breaks are left out", "patternProperties")
    named = dict(schema.get("properties", {}))
    for name, own in named.items():
        if matches(pattern, name):
            named[name] = {"allOf": [own, inner]}
    named = dict.fromkeys((name for name in names if name not in named), True) | named
    rest = without_keywords(schema, "patternProperties", "properties")
    return {**rest, "properties": named, "additionalProperties": inner}


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
