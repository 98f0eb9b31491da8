"""A pytest plugin that writes the strings of xgrammar's own tests to a file, each with the schema that it is tried on.

It runs in an environment with xgrammar, on the tests of its source distribution (Apache License 2.0); peers_suites.py
starts it so:

    XGRAMMAR_STRINGS=strings.jsonl pytest -p xgrammar_strings xgrammar-0.2.9/tests/python/test_json_schema_converter.py
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import xgrammar
import xgrammar.testing

_made: dict[int, tuple[Any, str]] = {}  # each grammar, kept alive, with its schema, by the grammar's id
_seen: set[str] = set()


def pytest_configure() -> None:
    make = xgrammar.Grammar.from_json_schema
    xgrammar.Grammar.from_json_schema = staticmethod(_noted(make))
    xgrammar.testing._is_grammar_accept_string = _recorded(xgrammar.testing._is_grammar_accept_string)


def _noted(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `make`, which notes what it has made a grammar of."""

    @functools.wraps(make)
    def noted(schema: Any, *args: Any, **kwargs: Any) -> Any:
        grammar = make(schema, *args, **kwargs)
        source = schema.model_json_schema() if isinstance(schema, type) else schema
        _made[id(grammar)] = grammar, source if isinstance(source, str) else json.dumps(source)
        return grammar

    return noted


def _recorded(accepts: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(accepts)
    def recorded(grammar: Any, text: Any, *args: Any, **kwargs: Any) -> bool:
        if id(grammar) in _made and isinstance(text, str):
            line = json.dumps({"source": _made[id(grammar)][1], "text": text})
            if line not in _seen:
                _seen.add(line)
                with open(os.environ["XGRAMMAR_STRINGS"], "a") as file:
                    file.write(line + "\n")
        return accepts(grammar, text, *args, **kwargs)

    return recorded
