"""Races, batch checkpoints, and patterns over forks."""
