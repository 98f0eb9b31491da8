"""Partial values: objects of a type that are still being generated."""
