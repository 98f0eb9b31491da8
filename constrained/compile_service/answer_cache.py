"""The compiled grammars and the refusals of specs, in caches bounded in bytes that drop the least recently used."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

import msgspec

from plait.constrained.grammar import Grammar
from plait.constrained.specs import GrammarError, Spec

REFUSALS_BYTES = 4 << 20
Value = TypeVar("Value")


class SpecCache(Generic[Value]):
    """Holds values of at most `max_bytes` in all, specs included. A larger value is not stored.

    >>> cache = SpecCache[Grammar](64 << 20)                              # doctest: +SKIP
    >>> cache.get(Regex("a")) is None                                     # doctest: +SKIP
    True
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[Spec, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, spec: Spec) -> Value | None:
        """Returns the value of `spec` and marks it as most recently used; None if there is none."""
        entry = self._entries.get(spec)
        if entry is None:
            return None
        self._entries.move_to_end(spec)
        return entry[0]

    def put(self, spec: Spec, value: Value, nbytes: int) -> None:
        """Stores `value` of `nbytes` and evicts the least recently used entries until it fits."""
        cost = nbytes + 2 * len(msgspec.msgpack.encode(spec))
        self.drop(spec)
        if cost > self.max_bytes:
            return
        while self.nbytes + cost > self.max_bytes:
            self.drop(next(iter(self._entries)))
        self._entries[spec] = (value, cost)
        self.nbytes += cost

    def specs(self) -> list[Spec]:
        """Returns the specs, the most recently used first."""
        return list(reversed(self._entries))

    def drop(self, spec: Spec) -> None:
        """Removes the entry of `spec`, if any."""
        _, cost = self._entries.pop(spec, (None, 0))
        self.nbytes -= cost


@dataclass(frozen=True)
class _Refusal:
    """Why a spec was refused, and the deadline by which the refusal expires (monotonic seconds)."""

    reason: str
    where: int | str | None
    until: float


class AnswerCache:
    """Holds grammars of at most `max_bytes` in all, and refusals of at most 4 MiB."""

    def __init__(self, max_bytes: int) -> None:
        self.grammars = SpecCache[Grammar](max_bytes)
        self._refusals = SpecCache[_Refusal](min(max_bytes, REFUSALS_BYTES))

    def get(self, spec: Spec) -> Grammar | GrammarError | None:
        """Returns the grammar of `spec`, or a new error if it was refused; None if neither is known."""
        grammar = self.grammars.get(spec)
        return self._refusal_of(spec) if grammar is None else grammar

    def put(self, spec: Spec, answer: Grammar | GrammarError, valid_for_s: float = math.inf) -> None:
        """Stores the answer; a refusal for `valid_for_s` seconds."""
        if isinstance(answer, GrammarError):
            refusal = _Refusal(answer.reason, answer.where, monotonic() + valid_for_s)
            self._refusals.put(spec, refusal, 500 + len(answer.reason))
        else:
            self.grammars.put(spec, answer, answer.nbytes)

    def _refusal_of(self, spec: Spec) -> GrammarError | None:
        known = self._refusals.get(spec)
        if known is not None and known.until < monotonic():
            self._refusals.drop(spec)
            known = None
        return None if known is None else GrammarError(known.reason, known.where)
