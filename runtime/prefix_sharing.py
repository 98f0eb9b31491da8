"""Which rows of a step read the prefix they share once for all of them, and how much reading that has spared.

Knows: batches, what the operators say a group costs. Must not know: kernels, the buffers in which groups reach them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from plait.kernels.layout import Sharing
from plait.runtime.scheduler.prefix_groups import PrefixGroup, PrefixGroups
from plait.runtime.scheduler.rows import BatchRow


class PrefixSharing:
    """`rule(most)`: what the operators say of steps whose rows bring up to `most` new tokens. `windows`: each layer's,
    None where a token sees all before it."""

    def __init__(self, rule: Callable[[int], Sharing], windows: Sequence[int | None]) -> None:
        self._rule, self._windows, self._num_layers = rule, Counter(windows), len(windows)
        self._finders: dict[Sharing, PrefixGroups] = {}
        self._found: list[PrefixGroup] = []  # what was weighed last, and
        self._chosen: list[PrefixGroup] = []  # what came of it
        self.num_spared = 0  # tokens of KV, of one layer, that were not read again, in all steps

    def groups(self, rows: Sequence[BatchRow], most: int) -> list[PrefixGroup]:
        """The groups worth a kernel of their own, best first; none where all together spare too little."""
        rule = self._rule(most)
        finder = self._finders.get(rule)
        if finder is None:
            finder = self._finders[rule] = PrefixGroups(rule.align, rule.cost, rule.widest)
        found = finder.find(rows)
        if found is not self._found:
            self._found = found
            self._chosen = found if sum(map(self._spared, found)) >= rule.least else []
        return self._chosen

    def count(self, groups: Sequence[PrefixGroup]) -> None:
        """Notes that a step was computed so."""
        self.num_spared += sum(group.num_spared for group in groups)

    def _spared(self, group: PrefixGroup) -> float:
        """Tokens of KV, on average over the layers: within a window there is less to spare."""
        seen = sum(
            count * (group.num_tokens if window is None else min(window, group.num_tokens))
            for window, count in self._windows.items()
        )
        return (len(group.rows) - 1) * seen / self._num_layers
