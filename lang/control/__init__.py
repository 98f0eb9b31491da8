"""Patterns over forks and programs: agents, beam search, votes and maps; and single calls without a program."""
