"""Gens that are asked again when a validator refused their value."""
