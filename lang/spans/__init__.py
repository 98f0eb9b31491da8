"""Calls of a run as they are now, and as spans of time in a trace."""
