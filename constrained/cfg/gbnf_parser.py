"""Parses GBNF, llama.cpp's grammar notation, into a syntax tree."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from plait.constrained.specs import GrammarError

MAX_DEPTH = 100
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\n]*)*")
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
TOKEN = re.compile(r"(!?)<(?:\[(\d+)\]|[^>\n]*)>")


@dataclass(frozen=True)
class CharClass:
    """One character inside `ranges` of code points, or outside them if `negated`."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True)
class RuleReference:
    """A reference to the rule `name`, written at index `where`."""

    name: str
    where: int


@dataclass(frozen=True)
class Sequence:
    """The parts one after another."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives:
    """One of the alternatives."""

    alternatives: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`part` repeated `low` to `high` times (None: unbounded)."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class TokenTerminal:
    """One token, by its id or its text such as "<think>", or any other one if `negated`; written at index `where`."""

    token: int | str
    negated: bool
    where: int = field(compare=False)


@dataclass(frozen=True)
class TokenSet:
    """One token of `ids`, or one outside of them if `negated`."""

    ids: frozenset[int]
    negated: bool = False

    @property
    def lark(self) -> str:
        """The set in llguidance's notation."""
        ids = sorted(self.ids)
        begins = [one for at, one in enumerate(ids) if not at or ids[at - 1] != one - 1]
        ends = [one for at, one in enumerate(ids) if at + 1 == len(ids) or ids[at + 1] != one + 1]
        spans = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))
        return f"<[{'^' if self.negated else ''}{spans}]>"


Node: TypeAlias = CharClass | RuleReference | Sequence | Alternatives | Repeat | TokenTerminal | TokenSet


def parse_gbnf(grammar: str) -> dict[str, Node]:
    """Returns the rules by name, `root` among them. Raises GrammarError with the character index of an error.

    >>> parse_gbnf("root ::= [a]")
    {'root': Sequence(parts=(CharClass(ranges=((97, 97),), negated=False),))}
    """
    return _Parser(grammar).rules()


class _Parser:
    def __init__(self, grammar: str) -> None:
        self._text, self._at, self._depth = grammar, 0, 0
        self._references: list[RuleReference] = []

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            start, name = self._at, self._name("a rule's name")
            self._skip(_SPACE)
            self._expect("::=")
            if name in rules:
                raise GrammarError(f"the rule {name} is given twice", start)
            self._skip(_SPACE_AND_LINES)
            rules[name] = self._alternatives(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise GrammarError("unexpected text", self._at)
            self._skip(_SPACE_AND_LINES)
        if "root" not in rules:
            raise GrammarError("there is no rule named root")
        for reference in self._references:
            if reference.name not in rules:
                raise GrammarError(f"there is no rule named {reference.name}", reference.where)
        return rules

    def _alternatives(self, nested: bool) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GrammarError("groups are nested too deeply", self._at)
        alternatives = [self._sequence(nested)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            alternatives.append(self._sequence(nested))
        self._depth -= 1
        return alternatives[0] if len(alternatives) == 1 else Alternatives(tuple(alternatives))

    def _sequence(self, nested: bool) -> Node:
        parts: list[Node] = []
        space = _SPACE_AND_LINES if nested else _SPACE
        while (part := self._part()) is not None:
            self._skip(space)
            while self._at < len(self._text) and self._text[self._at] in "*+?{":
                part = self._quantified(part)
                self._skip(space)
            parts.append(part)
        return Sequence(tuple(parts))

    def _part(self) -> Node | None:
        char = self._text[self._at : self._at + 1]
        if char == '"':
            return self._literal()
        if char == "[":
            return self._chars()
        if char == ".":
            self._at += 1
            return CharClass((), negated=True)
        if char == "(":
            start, self._at = self._at, self._at + 1
            self._skip(_SPACE_AND_LINES)
            inner = self._alternatives(nested=True)
            if not self._text.startswith(")", self._at):
                raise GrammarError("this group is not closed", start)
            self._at += 1
            return inner
        if self._text.startswith(("<", "!<"), self._at):
            return self._token()
        if _NAME.match(self._text, self._at) is None:
            return None
        where = self._at
        reference = RuleReference(self._name("a name"), where)
        self._references.append(reference)
        return reference

    def _quantified(self, part: Node) -> Node:
        char = self._text[self._at : self._at + 1]
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char) if char else None
        if simple is not None:
            self._at += 1
            return Repeat(part, *simple)
        if char != "{":
            return part
        count = _COUNT.match(self._text, self._at)
        if count is None:
            raise GrammarError("a count is written {n}, {n,} or {n,m}", self._at)
        low = int(count[1])
        high = low if not count[2] else int(count[3]) if count[3] else None
        if high is not None and (high < low or high > 100_000):
            raise GrammarError("this count is out of order or too large", self._at)
        self._at = count.end()
        return Repeat(part, low, high)

    def _literal(self) -> Node:
        start, self._at = self._at, self._at + 1
        parts: list[Node] = []
        while not self._text.startswith('"', self._at):
            code = self._character("this text is not closed", start)
            parts.append(CharClass(((code, code),)))
        self._at += 1
        return Sequence(tuple(parts))

    def _token(self) -> Node:
        start, token = self._at, TOKEN.match(self._text, self._at)
        if token is None:
            raise GrammarError("this token is not closed", start)
        self._at = token.end()
        return TokenTerminal(token[0].removeprefix("!") if token[2] is None else int(token[2]), bool(token[1]), start)

    def _chars(self) -> Node:
        start, self._at = self._at, self._at + 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            low = high = self._character("this class is not closed", start)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character("this class is not closed", start)
            if high < low:
                raise GrammarError("this range is out of order", start)
            ranges.append((low, high))
        self._at += 1
        return CharClass(tuple(ranges), negated)

    def _character(self, reason: str, start: int) -> int:
        """Returns the code point of the next character or escape."""
        char = self._text[self._at : self._at + 1]
        if not char or char == "\n":
            raise GrammarError(reason, start)
        if char != "\\":
            self._at += 1
            return ord(char)
        escape = _ESCAPE.match(self._text, self._at)
        if escape is None or (escape[4] and escape[4] not in _SIMPLE_ESCAPES):
            raise GrammarError("unknown escape", self._at)
        self._at = escape.end()
        code = int(escape[1] or escape[2] or escape[3], 16) if not escape[4] else ord(_SIMPLE_ESCAPES[escape[4]])
        if code > 0x10FFFE or 0xD800 <= code < 0xE000:
            raise GrammarError("this character cannot occur in a text", escape.start())
        return code

    def _name(self, what: str) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise GrammarError(f"{what} is expected here", self._at)
        self._at = match.end()
        return match[0]

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise GrammarError(f"{text} is expected here", self._at)
        self._at += len(text)

    def _skip(self, space: re.Pattern[str]) -> None:
        match = space.match(self._text, self._at)
        self._at = match.end() if match else self._at
