"""Complements of schemas."""

from plait.constrained.json_schema.rewrite.negation.complement import negate, subtract

__all__ = ["negate", "subtract"]
