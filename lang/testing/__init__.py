"""Backends for the tests of programs: answers from a script, and calls recorded on a runtime and played again.

Knows: calls, and the texts before them. Must not know: models, sockets, nodes.
"""
