"""Runs the bodies of programs: in the caller's thread, in others, on an event loop, one or many."""
