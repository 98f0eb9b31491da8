"""Parses the docstring of a tool: its description and its parameters, in Google, NumPy or Sphinx style."""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|raises|yields|examples?|notes?):?\s*$", re.IGNORECASE
)
_PARAMETERS = re.compile(r"(args|arguments|parameters|params):?\s*$", re.IGNORECASE)
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(\w+):\s*(.*)")
_GOOGLE = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_NUMPY = re.compile(r"(\w+)\s*(?::.*)?$")


def read_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """Returns (description of the function, {parameter: description}).

    >>> read_docstring("Adds.\\n\\nArgs:\\n    a: the first\\n")
    ('Adds.', {'a': 'the first'})
    """
    lines = inspect.cleandoc(text or "").splitlines()
    start = next((i for i, line in enumerate(lines) if _SECTION.match(line) or line.startswith(":")), len(lines))
    return " ".join(" ".join(lines[:start]).split()), _parameters(lines[start:])


def _parameters(lines: list[str]) -> dict[str, str]:
    descriptions: dict[str, str] = {}
    name, inside = "", False  # the current parameter; whether the line is in a section on parameters
    for line in lines:
        sphinx = _SPHINX.match(line)
        if sphinx:
            name, descriptions[sphinx[1]] = sphinx[1], sphinx[2]
        elif _SECTION.match(line):
            name, inside = "", _PARAMETERS.match(line) is not None
        elif inside and line.strip(" -"):
            name = _parameter(line, name, descriptions)
        elif line.startswith(":"):
            name = ""
        elif name and line.startswith(" "):
            descriptions[name] += f" {line.strip()}"
    return {name: " ".join(text.split()) for name, text in descriptions.items() if text.strip()}


def _parameter(line: str, name: str, descriptions: dict[str, str]) -> str:
    """Reads a line of a section on parameters: a new parameter, or more text of parameter `name`. Returns the name of
    the parameter that the line belongs to."""
    depth = len(line) - len(line.lstrip())
    head = _GOOGLE.match(line.strip()) if depth else _NUMPY.match(line)
    if head and (depth <= 4 or not name):
        if depth and name and not head[2] and name in descriptions:
            descriptions[name] += f" {line.strip()}"
            return name
        descriptions[head[1]] = head[2] if depth else ""
        return head[1]
    if name:
        descriptions[name] += f" {line.strip()}"
    return name
