"""Compiled grammars by their spec, the least recently used dropped first, bounded in bytes.

Knows: what each grammar says it weighs. Must not know: how it was compiled.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from plait.constrained.grammar import Grammar
from plait.constrained.specs import Spec


class GrammarCache:
    """Holds grammars of at most `max_bytes` together, their specs included; one that is larger is not kept.

    >>> cache = GrammarCache(64 << 20)
    >>> cache.get(Regex("a")) is None                                     # doctest: +SKIP
    True
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._kept: OrderedDict[Spec, tuple[Grammar, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, spec: Spec) -> Grammar | None:
        """The grammar of `spec`, now the most recently used; None where it is not held."""
        found = self._kept.get(spec)
        if found is None:
            return None
        self._kept.move_to_end(spec)
        return found[0]

    def put(self, spec: Spec, grammar: Grammar) -> None:
        """Keep `grammar`, and drop what no longer fits."""
        cost = grammar.nbytes + 2 * len(msgspec.msgpack.encode(spec))
        if cost > self.max_bytes:
            return
        self._drop(spec)
        while self.nbytes + cost > self.max_bytes:
            self._drop(next(iter(self._kept)))
        self._kept[spec] = (grammar, cost)
        self.nbytes += cost

    def _drop(self, spec: Spec) -> None:
        _, cost = self._kept.pop(spec, (None, 0))
        self.nbytes -= cost
