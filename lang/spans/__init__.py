"""Traces of program runs: calls as spans, an HTML page, a Perfetto file."""
