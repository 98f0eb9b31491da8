"""Decides which rows of a step read a shared prefix once together, and counts the reads saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from plait.kernels.layout import PrefixSharingCost
from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.batch.prefix_groups import PrefixGroup, PrefixGroups


class PrefixSharing:
    """Groups of rows whose shared prefix is worth a separate attention pass.

    `cost_of(max_q_len)` is the operators' cost for steps whose rows have up to `max_q_len` new tokens; `windows` has
    each layer's attention window, None for full attention.
    """

    def __init__(self, cost_of: Callable[[int], PrefixSharingCost], windows: Sequence[int | None]) -> None:
        self._cost_of, self._windows, self._num_layers = cost_of, Counter(windows), len(windows)
        self._group_finders: dict[PrefixSharingCost, PrefixGroups] = {}
        self._last_groups: list[PrefixGroup] = []  # candidates of the last call, and
        self._last_choice: list[PrefixGroup] = []  # what was chosen of them
        self.num_saved_reads = 0  # tokens of one layer's KV that were not read again, over all steps

    def groups(self, rows: Sequence[ScheduledRequest], max_q_len: int) -> list[PrefixGroup]:
        """Returns the groups to read together, largest saving first; none if all of them together save too little."""
        cost = self._cost_of(max_q_len)
        finder = self._group_finders.get(cost)
        if finder is None:
            finder = self._group_finders[cost] = PrefixGroups(cost.align, cost.group_cost, cost.max_row_tokens)
        candidates = finder.find(rows)
        if candidates is not self._last_groups:
            self._last_groups = candidates
            saved_tokens = sum(map(self._saved_tokens, candidates))
            self._last_choice = candidates if saved_tokens >= cost.min_saved_tokens else []
        return self._last_choice

    def count(self, groups: Sequence[PrefixGroup]) -> None:
        """Records that a step read these groups together."""
        self.num_saved_reads += sum(group.num_saved_reads for group in groups)

    def _saved_tokens(self, group: PrefixGroup) -> float:
        """Tokens of KV saved, averaged over the layers; a layer with a window saves at most the window."""
        visible_tokens = sum(
            count * (group.num_tokens if window is None else min(window, group.num_tokens))
            for window, count in self._windows.items()
        )
        return (len(group.rows) - 1) * visible_tokens / self._num_layers
