"""Values of Python types: how a type becomes a constraint, and a text becomes a value of that type.

Knows: types, JSON Schema and patterns. Must not know: states, calls, sessions.
"""
