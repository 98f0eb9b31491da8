"""Patterns of JSON Schema: their conversion to plain patterns, and operations on them."""

from plait.constrained.json_schema.rewrite.patterns.conversion import (
    ANY,
    ecma_to_plain_pattern,
    ecma_to_plain_patterns,
)
from plait.constrained.json_schema.rewrite.patterns.operations import (
    are_disjoint,
    complement_pattern,
    finite_texts,
    is_narrowed,
    matches,
    matches_whole,
    to_ecma,
)

__all__ = [
    "ANY",
    "are_disjoint",
    "complement_pattern",
    "ecma_to_plain_pattern",
    "ecma_to_plain_patterns",
    "finite_texts",
    "is_narrowed",
    "matches",
    "matches_whole",
    "to_ecma",
]
