"""Backends for tests of programs: scripted answers, and recordings that are replayed."""
