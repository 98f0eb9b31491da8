"""Regular expressions of the source: none can take exponential time, whatever text it is matched against.

Python's `re` backtracks. A repetition within an unlimited repetition may match one text in exponentially many ways.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("plait", "lang", "runtime", "constrained", "kernels")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MAX_REPEATS = 20  # a repetition with a higher limit counts as unlimited
LINEAR = {
    # its numbers end with a unit, which no number contains
    r"-?(?:[0-9]+(?:\.[0-9]+)?|(?:[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|ms|s|m|h))+)",
    # nothing follows them, so they match at the first attempt
    r"(?:[ \t]|#[^\n]*)*",
    r"(?:\s|#[^\n]*)*",
}


def literal_patterns(source: str) -> Iterator[str]:
    """The patterns that a source passes to functions of `re`, without those that it computes."""
    for node in ast.walk(ast.parse(source)) if re.search(r"\bre\s*\.", source) else ():
        if isinstance(node, ast.Call) and is_function_of_re(node.func) and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str | bytes):
                yield first.value if isinstance(first.value, str) else first.value.decode("latin-1")


def is_function_of_re(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re"


def has_nested_repetition(pattern: str) -> bool:
    """Whether a repetition of varying length occurs within an unlimited one."""

    def search(tree: Any, is_inside: bool) -> bool:
        for operation, argument in tree:
            inside = is_inside
            values = list(argument) if isinstance(argument, tuple | list) else [argument]
            if str(operation) == "POSSESSIVE_REPEAT":  # what it has matched is not matched in another way later
                inside = False
            elif len(values) == 3 and hasattr(values[2], "data"):  # minimum, maximum, what is repeated
                minimum, maximum = int(values[0]), int(values[1])
                if is_inside and maximum > 1 and maximum != minimum:
                    return True
                inside = is_inside or maximum > MAX_REPEATS
            for value in values:
                branches = value if isinstance(value, list) else [value]
                if any(search(branch, inside) for branch in branches if hasattr(branch, "data")):
                    return True
        return False

    return search(re._parser.parse(pattern), False)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def patterns() -> dict[str, list[str]]:
    """{pattern: the files that use it}."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for pattern in literal_patterns(path.read_text("utf-8")):
            found.setdefault(pattern, []).append(str(path.relative_to(ROOT)))
    return found


def test_no_pattern_repeats_a_repetition(patterns: dict[str, list[str]]) -> None:
    nested = {pattern: files for pattern, files in patterns.items() if has_nested_repetition(pattern)}
    assert {pattern: files for pattern, files in nested.items() if pattern not in LINEAR} == {}


def test_the_exceptions_are_in_use(patterns: dict[str, list[str]]) -> None:
    assert patterns.keys() >= LINEAR
    assert len(patterns) > 40


@pytest.mark.parametrize(
    ("pattern", "is_nested"),
    [
        *(
            (text, True)
            for text in ("(a+)+", "(?:a*b?)*c", "((a|b+)x?)*", "(?=(a+)*)", "(a{2,9}b)+", "([0-9]+(m|s)?)+")
        ),
        *((text, False) for text in ("a+b+", "(ab?)+", "(a{3}b)*", "(a+){3}", "[a-z]+(?:x|y*)", "(?:a|b)*")),
        *((text, False) for text in ("(a+)*+b", "(?:a++|b)*c")),
        *((text, True) for text in ("((a+)+b)*+", "(?:a++b*)*c")),
    ],
)
def test_nested_repetitions_are_found(pattern: str, is_nested: bool) -> None:
    assert has_nested_repetition(pattern) == is_nested
