"""Displays of states, runs, usage, graphs and beams as HTML: in notebooks, and as the page of a trace."""
