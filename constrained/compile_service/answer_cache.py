"""The compiled grammars and the refusals of specs, each in a cache bounded in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic

from plait.constrained.compile_service.spec_cache import SpecCache
from plait.constrained.grammar import Grammar
from plait.constrained.specs import GrammarError, Spec

REFUSALS_BYTES = 4 << 20


@dataclass(frozen=True)
class _Refusal:
    """Why a spec was refused, and until when the refusal is valid (monotonic seconds)."""

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
