"""Patterns over forks and programs: agents, beam search, trees, votes and maps."""
