"""Complements of schemas."""

from plait.constrained.json_schema.rewrite.negation.complement import negate, subtract
from plait.constrained.json_schema.rewrite.negation.simple_keywords import negate_pattern

__all__ = ["negate", "negate_pattern", "subtract"]
