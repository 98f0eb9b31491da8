"""Complements of schemas."""
