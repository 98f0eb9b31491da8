"""Backends for the tests of programs: answers from a script, and calls recorded on a runtime and played again."""
