"""Rewrites a pattern of Python's `re` into a plain form with the same meaning for all automaton builders.

The tree is Python's own, so the syntax, its errors and their positions are Python's too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from plait.constrained.regex.char_classes import (
    MAX_CHARACTER,
    Ranges,
    class_ranges,
    escape_code_point,
    merge_ranges,
    named_ranges,
    write_class,
    write_literal,
)
from plait.constrained.specs import GrammarError

# Its public name is deprecated since 3.11; there is no other access to the tree.
from re import _parser  # type: ignore[attr-defined]  # isort: skip

ParseItem: TypeAlias = tuple[Any, Any]

MAXREPEAT = _parser.MAXREPEAT
CLASS_FLAGS = re.IGNORECASE | re.ASCII | re.UNICODE
CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_PIECES = re.compile(
    r"\\(?P<escape>.)|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<group>\(\?(?:P=|<?[=!]|\(|>))|(?P<possessive>[*+?}]\+)|(?P<anchor>[\^$])|.",
    re.DOTALL,
)
_REFUSED = {
    "ASSERT": ("lookaround is not supported", "group", "=!"),
    "ASSERT_NOT": ("lookaround is not supported", "group", "=!"),
    "FAILURE": ("lookaround is not supported", "group", "=!"),
    "GROUPREF": ("a backreference is not supported", "escape", "123456789"),
    "GROUPREF_EXISTS": ("a conditional group is not supported", "group", "("),
    "ATOMIC_GROUP": ("an atomic group is not supported", "group", ">"),
    "POSSESSIVE_REPEAT": ("a possessive quantifier is not supported", "possessive", "+"),
    "AT_BOUNDARY": ("a word boundary is not supported", "escape", "b"),
    "AT_NON_BOUNDARY": ("a word boundary is not supported", "escape", "B"),
    "AT_BEGINNING": ("^ is supported at the start of the pattern only", "anchor", "^"),
    "AT_END": ("$ is supported at the end of the pattern only", "anchor", "$"),
    "AT_BEGINNING_STRING": (r"\A is supported at the start of the pattern only", "escape", "A"),
    "AT_END_STRING": (r"\Z is supported at the end of the pattern only", "escape", "Z"),
}
REASONS = {op: reason for op, (reason, _, _) in _REFUSED.items()}
ASSERTION_REASONS = frozenset(
    reason for op, reason in REASONS.items() if op == "FAILURE" or op.startswith(("ASSERT", "AT_"))
)
"""The reasons of refusals of assertions, which lookaround_automaton.py writes out."""


@dataclass(frozen=True)
class PlainPattern:
    """A pattern of literals, classes, groups, `|` and counted repeats only.

    With its repeats written out it has `length` characters, and about `weight` bytes and ranges of bytes.
    """

    pattern: str
    length: int = 0
    weight: float = 0.0

    def wrap(self, before: str, after: str, times: int = 1) -> PlainPattern:
        """Returns this pattern between two pieces of syntax, counted `times` times."""
        return PlainPattern(before + self.pattern + after, self.length * times, self.weight * times)


def to_plain_pattern(pattern: str, writer: type[PlainPatternWriter] | None = None) -> PlainPattern:
    """Returns `pattern`, as `re.fullmatch` reads it, without flags, anchors or named classes.

    `writer` writes the nodes. Raises GrammarError, with the position, for what `re` refuses and for what is not regular
    or not supported.

    >>> to_plain_pattern("^ab?$").pattern
    'a(?:b){0,1}'
    """
    with syntax_errors():
        tree = parse_regex(pattern)
        return (writer or PlainPatternWriter)(pattern).sequence(list(tree), tree.state.flags, True, True)


@contextmanager
def syntax_errors() -> Iterator[None]:
    """Raises GrammarError for what `re` refuses, with the position, and for what is too large to be read."""
    try:
        yield
    except re.error as error:
        raise GrammarError(error.msg, error.pos) from None
    except OverflowError:
        raise GrammarError("a repeat count is too large") from None
    except RecursionError:
        raise GrammarError("the pattern is nested too deeply") from None


def parse_regex(pattern: str) -> Any:
    """Returns Python's parse tree of `pattern`, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _parser.parse(pattern)


def check_regex(pattern: str) -> None:
    """Raises GrammarError for what `re` refuses only as it compiles: lookbehind without a fixed width."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with syntax_errors():
            re.compile(pattern)


class PlainPatternWriter:
    """Writes nodes of the parse tree; the pattern itself only serves to locate what is refused."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def sequence(self, items: list[ParseItem], flags: int, at_start: bool, at_end: bool) -> PlainPattern:
        """Writes items in sequence; `at_start` and `at_end` say that nothing precedes or follows them."""
        fixed = [str(op) != "AT" for op, _ in items]
        first = fixed.index(True) if True in fixed else len(items)
        last = len(items) - 1 - fixed[::-1].index(True) if True in fixed else -1
        return _joined(
            "",
            (
                self._item(str(op), value, flags, at_start and index <= first, at_end and index >= last)
                for index, (op, value) in enumerate(items)
            ),
        )

    def _item(self, op: str, value: Any, flags: int, at_start: bool, at_end: bool) -> PlainPattern:
        match op:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._one_character(op, value, flags)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(value, flags, at_start, at_end)
            case "SUBPATTERN":
                _, added, removed, items = value
                inner = self.sequence(list(items), (flags | added) & ~removed, at_start, at_end)
                return inner.wrap("(?:", ")")
            case "BRANCH":
                arms = [self.sequence(list(arm), flags, at_start, at_end) for arm in value[1]]
                return _joined("|", arms).wrap("(?:", ")")
            case "AT":
                return self._anchor(str(value), at_start, at_end)
        raise self.refusal(op)

    def _anchor(self, op: str, at_start: bool, at_end: bool) -> PlainPattern:
        if (at_start and op.startswith("AT_BEGINNING")) or (at_end and op.startswith("AT_END")):
            return PlainPattern("")
        raise self.refusal(op)

    def _repeat(self, value: Any, flags: int, at_start: bool, at_end: bool) -> PlainPattern:
        low, high, items = value
        once = high == 1
        inner = self.sequence(list(items), flags, at_start and once, at_end and once)
        if high is MAXREPEAT:
            return inner.wrap("(?:", f"){{{low},}}", low + 1)
        return inner.wrap("(?:", f"){{{low},{high}}}", high)

    def _one_character(self, op: str, value: Any, flags: int) -> PlainPattern:
        if op == "LITERAL" and not flags & re.IGNORECASE:
            if value > MAX_CHARACTER or 0xD800 <= value <= 0xDFFF:
                where = self._pattern.find(chr(value))
                raise GrammarError(f"U+{value:04X} cannot occur in a text", where if where >= 0 else None)
            text = chr(value)
            return PlainPattern(write_literal(text), 1, len(text.encode()))
        ranges = self.character_ranges(op, value, flags)
        return PlainPattern(write_class(ranges), 1, 1 + len(ranges) / 4)

    def character_ranges(self, op: str, value: Any, flags: int) -> Ranges:
        """Returns what a node of one character matches under `flags`."""
        if op == "ANY":
            return merge_ranges([] if flags & re.DOTALL else [(10, 10)], negated=True)
        members: list[ParseItem] = value if op == "IN" else [("LITERAL", value)]
        negated = op == "NOT_LITERAL" or str(members[0][0]) == "NEGATE"
        spans, named = list[tuple[int, int]](), list[str]()
        for kind, content in members:
            if str(kind) == "CATEGORY":
                named.append(CATEGORIES[str(content)])
            elif str(kind) != "NEGATE":
                spans.append((content, content) if str(kind) == "LITERAL" else tuple(content))
        if not flags & re.IGNORECASE:
            spans += (span for name in named for span in named_ranges(name, flags & CLASS_FLAGS))
            return merge_ranges(spans, negated)
        text = "".join(f"{escape_code_point(low)}-{escape_code_point(high)}" for low, high in spans)
        return class_ranges(f"[{'^' if negated else ''}{text}{''.join(named)}]", flags & CLASS_FLAGS)

    def refusal(self, op: str) -> GrammarError:
        """Returns the error for a node that is not supported, with its place in the pattern."""
        reason, kind, ends = _REFUSED.get(op, (f"{op.lower()} is not supported", "", ""))
        for piece in _PIECES.finditer(self._pattern):
            text = piece.group(0)
            is_refused = piece.lastgroup == kind and text[-1] in ends and text != "(?P="
            if is_refused and not (op == "AT_BEGINNING" and piece.start() == 0):
                return GrammarError(reason, piece.start())
            if op == "GROUPREF" and text == "(?P=":
                return GrammarError(reason, piece.start())
        return GrammarError(reason)


def _joined(between: str, parts: Iterable[PlainPattern]) -> PlainPattern:
    listed = list(parts)
    pattern = between.join(part.pattern for part in listed)
    return PlainPattern(pattern, sum(part.length for part in listed), sum(part.weight for part in listed))
