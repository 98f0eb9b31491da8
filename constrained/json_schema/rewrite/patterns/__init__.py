"""Patterns of JSON Schema: their conversion to plain patterns, and operations on them."""
