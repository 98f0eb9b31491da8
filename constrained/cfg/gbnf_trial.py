"""Tries a grammar on long texts before it is used: no text may make the parser's work for a token grow without bound.

A grammar may divide its texts in ever more ways (`root ::= "a" root "b"?`). llguidance keeps all of them, and gives up
in the middle of an answer. So each recursive rule and each loop is repeated to a long text here, and some texts are
made by chance; where the parser gives up, the grammar is refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from math import inf

import numpy as np

from plait.constrained.cfg.gbnf_lexemes import Lexeme, LexemeGrammar, Part, lexeme_dfa
from plait.constrained.cfg.gbnf_parser import RuleReference
from plait.constrained.guidance.inner_matcher import compile_inner_matcher
from plait.constrained.specs import GrammarError
from plait.constrained.vocabulary import Vocabulary

ROW_ITEMS = 300  # of the parser at one place of a text, more than any grammar needs for each of its lexemes
MAX_BYTES = 12_000  # of a text
MAX_TOTAL = 200_000  # bytes of all texts
NUM_RANDOM = 4
_GROWS = (
    "its texts can be divided in more and more ways as they grow{where}, so that no answer could be finished; write "
    "a repetition as item* or (item separator)*, not as a rule that refers to itself, and leave no two optional or "
    "repeated parts in a row that begin alike"
)


def check_long_texts(grammar: LexemeGrammar, source: str, vocabulary: Vocabulary) -> None:
    """Raises GrammarError if llguidance, with `source` in its notation, gives up on a long text of `grammar`.

    >>> check_long_texts(LexemeGrammar(rules), source, vocabulary)        # doctest: +SKIP
    """
    most = ROW_ITEMS + 6 * len(grammar.lexemes)
    inner = compile_inner_matcher(source, vocabulary, max_items_in_row=most)
    total = 0
    for where, text in dict.fromkeys(_Texts(grammar, most).long_texts()):
        total += len(text)
        if total > MAX_TOTAL:
            return
        matcher = inner.deep_copy()
        matcher.try_consume_tokens(list(vocabulary.encode(text.decode(errors="replace"))))
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_GROWS.format(where=where))


class _Texts:
    """Long texts of a grammar."""

    def __init__(self, grammar: LexemeGrammar, times: int) -> None:
        self._parts, self._times = grammar.parts, times
        self._shortest: dict[str, bytes | None] = dict.fromkeys(self._parts)
        while True:  # until no shorter text is found
            found = {name: self._short(part) for name, part in self._parts.items()}
            if found == self._shortest:
                break
            self._shortest = found
        self._random = random.Random(0)

    def long_texts(self) -> Iterator[tuple[str, bytes]]:
        """Yields texts, complete or not, each with the rule that it repeats."""
        contexts = self._contexts("root")
        for name, part in self._parts.items():
            if name not in contexts:
                continue
            before, _ = contexts[name]
            where = f" in the rule {name.strip()}"
            around = self._contexts(name, strict=True).get(name)
            inner = self._short(part) or b""
            if around is not None:
                times = self._repeats(around[0] + around[1])
                yield where, before + around[0] * times + inner + around[1] * (times // 2)
            for head, body in self._loops(part, b""):
                if body:
                    yield where, before + head + body * self._repeats(body)
        for _ in range(NUM_RANDOM):
            yield "", self._long(self._parts["root"], 2 * self._times)

    def _repeats(self, body: bytes) -> int:
        return min(self._times, MAX_BYTES // max(1, len(body)))

    def _short(self, part: Part) -> bytes | None:
        """Returns a shortest known text of a part, None if none is known yet."""
        match part:
            case None:
                return b""
            case Lexeme():
                return b"" if part.is_optional else shortest_text(part.pattern)
            case RuleReference():
                return self._shortest[part.name]
            case ("one of", arms):
                texts = [text for arm in arms if (text := self._short(arm)) is not None]
                return min(texts, key=len, default=None)
            case ("repeat", [inner], low, _):
                text = self._short(inner) if low else b""
                return None if text is None else text * low
            case ("sequence", parts):
                shorts: list[bytes | None] = [self._short(inner) for inner in parts]
                return None if None in shorts else b"".join(one for one in shorts if one is not None)
        raise AssertionError(part)

    def _contexts(self, start: str, strict: bool = False) -> dict[str, tuple[bytes, bytes]]:
        """Returns short texts before and behind each rule that is reached from `start`; strict: in a step or more."""
        found: dict[str, tuple[bytes, bytes]] = {} if strict else {start: (b"", b"")}
        todo = [(b"", b"", start)]
        while todo:
            todo.sort(key=lambda one: -len(one[0]) - len(one[1]))
            before, behind, name = todo.pop()
            for head, tail, inner in self._places(self._parts[name], b"", b""):
                if inner not in found:
                    found[inner] = (before + head, tail + behind)
                    todo.append((*found[inner], inner))
        return found

    def _places(self, part: Part, before: bytes, behind: bytes) -> Iterator[tuple[bytes, bytes, str]]:
        """Yields the references in a part, each with short texts before and behind it."""
        match part:
            case RuleReference():
                yield before, behind, part.name
            case ("one of", arms):
                for arm in arms:
                    yield from self._places(arm, before, behind)
            case ("repeat", [inner], low, _):
                yield from self._places(inner, before, (self._short(inner) or b"") * max(0, low - 1) + behind)
            case ("sequence", parts):
                texts = [self._short(inner) or b"" for inner in parts]
                for at, inner in enumerate(parts):
                    head, tail = b"".join(texts[:at]), b"".join(texts[at + 1 :])
                    yield from self._places(inner, before + head, tail + behind)

    def _loops(self, part: Part, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields the text before each unbounded loop in a part, and a text of its body that is not empty."""
        match part:
            case ("one of", arms):
                for arm in arms:
                    yield from self._loops(arm, before)
            case ("repeat", [inner], _, high):
                if high is None:
                    for _ in range(3):
                        yield before, self._short(inner) or self._long(inner, 2)
                        yield before, self._long(inner, 8)
                yield from self._loops(inner, before)
            case ("sequence", parts):
                for at, inner in enumerate(parts):
                    head = b"".join(self._short(one) or b"" for one in parts[:at])
                    yield from self._loops(inner, before + head)

    def _long(self, part: Part, size: float) -> bytes:
        """Returns a text made by chance, of about `size` bytes where the part allows it."""
        todo: list[Part] = [part]
        written = bytearray()
        while todo:
            part = todo.pop()
            is_short = len(written) + len(todo) < size
            match part:
                case None:
                    continue
                case Lexeme():
                    if not part.is_optional or self._random.random() < 0.7:
                        written += shortest_text(part.pattern)
                case RuleReference():
                    if is_short:
                        todo.append(self._parts[part.name])
                    else:
                        written += self._shortest[part.name] or b""
                case ("one of", arms):
                    if is_short:
                        todo.append(self._random.choice(arms))
                    else:
                        written += self._short(part) or b""
                case ("repeat", [inner], low, high):
                    times = self._random.randint(low, int(min(inf if high is None else high, low + 3)))
                    if is_short and high is None and len(todo) < 3:
                        todo.append(part)
                    todo += [inner] * (times if is_short else low)
                case ("sequence", parts):
                    todo += reversed(parts)
        return bytes(written)


@lru_cache(maxsize=1024)
def shortest_text(pattern: str) -> bytes:
    """Returns a shortest text of a pattern.

    >>> shortest_text("ab|c")
    b'c'
    """
    states, accepting = lexeme_dfa(pattern)
    texts = {0: b""}
    todo = [0]
    for at in todo:
        if accepting[at]:
            return texts[at]
        for target in np.unique(states[at][states[at] >= 0]).tolist():
            if target not in texts:
                byte = int(np.flatnonzero(states[at] == target)[0])
                texts[target] = texts[at] + bytes([byte])
                todo.append(target)
    return b""
