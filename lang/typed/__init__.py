"""Typed values: converts Python types to constraints, and texts to values of these types."""
