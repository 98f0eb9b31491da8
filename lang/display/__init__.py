"""Displays of states, forks and traces: what is known of them now, in notebooks, files and browsers."""
