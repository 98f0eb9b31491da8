"""Which replicas hold which blocks: one table for all replicas, from block hash to a bit for each replica.

A replica that holds a block holds all blocks before it in the same prefix, so the longest prefix is found by bisection:
a choice reads about ten entries, however long the prompt and however many replicas there are.

A block is held because its replica reported it, or it is expected because a request with it was placed there and is not
over: so that a burst of requests with one prefix goes to one replica before the first report arrives. Of an expected
prompt the second table has only the blocks 0, 1, 3, 7, 15, 23, 31, …, which makes a placement six times cheaper.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache

MAX_BLOCKS = 1 << 20  # of one replica: 67 million tokens; what it reports beyond is dropped and counted
PROBE_STRIDE = 8


@lru_cache(maxsize=4096)
def probes(count: int) -> tuple[int, ...]:
    """The positions of a prompt of `count` blocks that the table of expected blocks has."""
    positions = (0, 1, 3, *range(PROBE_STRIDE - 1, count, PROBE_STRIDE))
    return positions[: bisect_right(positions, count - 1)]


class PrefixIndex:
    """The table. Replicas are small integers, which the caller gives out and reuses."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks, self.num_dropped = max_blocks, 0
        self._masks: dict[int, int] = {}
        self._expected_masks: dict[int, int] = {}
        self._reported: dict[int, set[int]] = {}
        self._expected: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """The number of distinct blocks in both tables together."""
        return len(self._masks) + len(self._expected_masks)

    def add_replica(self, replica: int) -> None:
        """Begins a replica without blocks."""
        self._reported[replica], self._expected[replica] = set(), set()

    def remove_replica(self, replica: int) -> None:
        """Forgets a replica and all its blocks."""
        for masks, blocks in ((self._masks, self._reported), (self._expected_masks, self._expected)):
            for block in blocks.pop(replica):
                _clear_bit(masks, block, 1 << replica)

    def reported(self, replica: int) -> frozenset[int]:
        """The blocks that the replica reported."""
        return frozenset(self._reported[replica])

    # -- reports of replicas --------------------------------------------------------------------------

    def change(self, replica: int, added: Iterable[int], removed: Iterable[int]) -> None:
        """Applies a batch of a replica."""
        reported, masks, bit = self._reported[replica], self._masks, 1 << replica
        for block in removed:
            reported.discard(block)
            _clear_bit(masks, block, bit)
        for block in added:
            if len(reported) >= self.max_blocks:
                self.num_dropped += 1
                continue
            reported.add(block)
            masks[block] = masks.get(block, 0) | bit

    def replace(self, replica: int, blocks: Iterable[int]) -> None:
        """Applies a snapshot of a replica: it holds exactly these blocks."""
        new, old = set(blocks), self._reported[replica]
        self.change(replica, new - old, old - new)

    # -- expectations ---------------------------------------------------------------------------------

    def expect(self, replica: int, blocks: Sequence[int]) -> Sequence[int]:
        """Counts on the prompt's blocks, which the replica will compute. Returns those that were not expected yet."""
        masks, bit = self._expected_masks, 1 << replica
        new = [block for position in probes(len(blocks)) if not masks.get(block := blocks[position], 0) & bit]
        self._expected[replica].update(new)
        for block in new:
            masks[block] = masks.get(block, 0) | bit
        return new

    def stop_expecting(self, replica: int, blocks: Iterable[int]) -> None:
        """Ends the expectation of blocks that `expect` returned."""
        expected, bit = self._expected[replica], 1 << replica
        for block in blocks:
            expected.discard(block)
            _clear_bit(self._expected_masks, block, bit)

    # -- lookup ---------------------------------------------------------------------------------------

    def longest(self, blocks: Sequence[int], among: int) -> tuple[int, int]:
        """Returns (number of leading blocks, mask of the replicas of the mask `among` that have so many).

        (0, `among`) if none has the first block.
        """
        count = self._num_reported(blocks, among)
        best = self._masks[blocks[count - 1]] & among if count else among
        num_expected = self._num_expected(blocks, among)
        if num_expected > count:
            return num_expected, self._expected_masks[blocks[num_expected - 1]] & among
        if count and num_expected == count:
            best |= self._expected_masks[blocks[count - 1]] & among
        return count, best

    def _num_reported(self, blocks: Sequence[int], among: int) -> int:
        get, low, high = self._masks.get, 0, len(blocks)
        if not high or not get(blocks[0], 0) & among:
            return 0
        while low < high:
            middle = (low + high) // 2
            if get(blocks[middle], 0) & among:
                low = middle + 1
            else:
                high = middle
        return low

    def _num_expected(self, blocks: Sequence[int], among: int) -> int:
        get = self._expected_masks.get
        if not blocks or not get(blocks[0], 0) & among:
            return 0
        positions = probes(len(blocks))
        low, high = 1, len(positions)
        while low < high:
            middle = (low + high) // 2
            if get(blocks[positions[middle]], 0) & among:
                low = middle + 1
            else:
                high = middle
        return positions[low - 1] + 1


def _clear_bit(masks: dict[int, int], block: int, bit: int) -> None:
    mask = masks.get(block, 0) & ~bit
    if mask:
        masks[block] = mask
    else:
        masks.pop(block, None)
