"""Which rows of a step read the prefix they share once for all of them, and how much reading that has spared.

Knows: batches, what the operators say a group costs. Must not know: kernels, the buffers in which groups reach them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from plait.kernels.layout import PrefixSharingCost
from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.batch.prefix_groups import PrefixGroup, PrefixGroups


class PrefixSharing:
    """`cost_of(most)`: what the operators say of steps whose rows bring up to `max_q_len` new tokens. `windows`: each layer's,
    None where a token sees all before it."""

    def __init__(self, cost_of: Callable[[int], PrefixSharingCost], windows: Sequence[int | None]) -> None:
        self._cost_of, self._windows, self._num_layers = cost_of, Counter(windows), len(windows)
        self._group_finders: dict[PrefixSharingCost, PrefixGroups] = {}
        self._last_groups: list[PrefixGroup] = []  # what was weighed last, and
        self._last_choice: list[PrefixGroup] = []  # what came of it
        self.num_spared = 0  # tokens of KV, of one layer, that were not read again, in all steps

    def groups(self, rows: Sequence[ScheduledRequest], max_q_len: int) -> list[PrefixGroup]:
        """The groups worth a kernel of their own, best first; none where all together spare too little."""
        cost_of = self._cost_of(max_q_len)
        finder = self._group_finders.get(cost_of)
        if finder is None:
            finder = self._group_finders[cost_of] = PrefixGroups(
                cost_of.align, cost_of.group_cost, cost_of.max_row_tokens
            )
        found = finder.find(rows)
        if found is not self._last_groups:
            self._last_groups = found
            self._last_choice = found if sum(map(self._saved_tokens, found)) >= cost_of.min_saved_tokens else []
        return self._last_choice

    def count(self, groups: Sequence[PrefixGroup]) -> None:
        """Notes that a step was computed so."""
        self.num_spared += sum(group.num_spared for group in groups)

    def _saved_tokens(self, group: PrefixGroup) -> float:
        """Tokens of KV, on average over the layers: within a window there is less to spare."""
        visible_tokens = sum(
            count * (group.num_tokens if window is None else min(window, group.num_tokens))
            for window, count in self._windows.items()
        )
        return (len(group.rows) - 1) * visible_tokens / self._num_layers
