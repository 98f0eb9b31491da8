"""HTML from a template: displays in notebooks and the page of a trace. Imports nothing else of plait."""
