"""Values of Python types: how a type becomes a constraint, and a text becomes a value of that type."""
