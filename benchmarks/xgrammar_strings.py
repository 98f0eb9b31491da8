"""A pytest plugin that writes the strings of xgrammar's own tests to a file, each with what xgrammar says of it.

It runs in an environment with xgrammar, on the tests of its source distribution (Apache License 2.0); peers_suites.py
starts it so:

    XGRAMMAR_STRINGS=strings.jsonl pytest -p xgrammar_strings xgrammar-0.2.9/tests/python/test_json_schema_converter.py

A line has `kind` ("schema", "regex" or "ebnf"), `source`, `options` as given to xgrammar, `text`, and `accepts`: what
xgrammar answered in this run.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from typing import Any

import xgrammar
import xgrammar.testing

_KINDS = {"from_json_schema": "schema", "from_regex": "regex", "from_ebnf": "ebnf"}
_made: list[tuple[Any, dict[str, Any]]] = []  # each grammar, kept alive, with the fields of its lines
_of_id: dict[int, dict[str, Any]] = {}
_seen: set[str] = set()


def pytest_configure() -> None:
    for name, kind in _KINDS.items():
        setattr(xgrammar.Grammar, name, staticmethod(_noted(getattr(xgrammar.Grammar, name), kind)))
    xgrammar.testing._is_grammar_accept_string = _recorded(xgrammar.testing._is_grammar_accept_string)


def _noted(make: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Returns `make`, which notes what it has made a grammar of."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def noted(*args: Any, **kwargs: Any) -> Any:
        grammar = make(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        source, *_ = given.arguments.values()
        if isinstance(source, type):
            source = source.model_json_schema()
        options = dict(list(given.arguments.items())[1:])
        fields = {"kind": kind, "source": source if isinstance(source, str) else json.dumps(source), "options": options}
        _made.append((grammar, fields))
        _of_id[id(grammar)] = fields
        return grammar

    return noted


def _recorded(accepts: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(accepts)
    def recorded(grammar: Any, text: Any, *args: Any, **kwargs: Any) -> bool:
        answer = accepts(grammar, text, *args, **kwargs)
        fields = _of_id.get(id(grammar)) or (
            {"kind": "ebnf", "source": grammar, "options": {}} if isinstance(grammar, str) else None
        )
        if fields is not None and isinstance(text, str):
            line = json.dumps({**fields, "text": text, "accepts": answer}, default=str)
            if line not in _seen:
                _seen.add(line)
                with open(os.environ["XGRAMMAR_STRINGS"], "a") as file:
                    file.write(line + "\n")
        return answer

    return recorded
