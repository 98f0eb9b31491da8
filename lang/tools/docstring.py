"""What a function's docstring says of it and of its parameters: Google's, NumPy's and Sphinx's styles."""

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
    """(what the function does, {parameter: what it is}).

    >>> read_docstring("Adds.\\n\\nArgs:\\n    a: the first\\n")
    ('Adds.', {'a': 'the first'})
    """
    lines = inspect.cleandoc(text or "").splitlines()
    start = next((i for i, line in enumerate(lines) if _SECTION.match(line) or line.startswith(":")), len(lines))
    return " ".join(" ".join(lines[:start]).split()), _parameters(lines[start:])


def _parameters(lines: list[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    name, inside = "", False
    for line in lines:
        sphinx = _SPHINX.match(line)
        if sphinx:
            name, said[sphinx[1]] = sphinx[1], sphinx[2]
        elif _SECTION.match(line):
            name, inside = "", _PARAMETERS.match(line) is not None
        elif inside and line.strip(" -"):
            name = _parameter(line, name, said)
        elif line.startswith(":"):
            name = ""
        elif name and line.startswith(" "):
            said[name] += f" {line.strip()}"
    return {name: " ".join(text.split()) for name, text in said.items() if text.strip()}


def _parameter(line: str, name: str, said: dict[str, str]) -> str:
    """One line of a section on parameters: a new one, or more of parameter `name`. The name it belongs to."""
    depth = len(line) - len(line.lstrip())
    head = _GOOGLE.match(line.strip()) if depth else _NUMPY.match(line)
    if head and (depth <= 4 or not name):
        if depth and name and not head[2] and name in said:
            said[name] += f" {line.strip()}"
            return name
        said[head[1]] = head[2] if depth else ""
        return head[1]
    if name:
        said[name] += f" {line.strip()}"
    return name
