"""Which replicas hold which blocks: one table for all replicas, from block hash to a bit for each replica.

A replica that holds a block holds all blocks before it in the same prefix, so the longest prefix is found by bisection:
a choice reads about ten entries, however long the prompt and however many replicas there are.

A block is held because its replica reported it, or it is expected because a request with it was placed there and is not
over: so that a burst of requests with one prefix goes to one replica before the first report arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_BLOCKS = 1 << 20  # of one replica: 67 million tokens; what it reports beyond is dropped and counted


class PrefixIndex:
    """The table. Replicas are small integers, which the caller gives out and reuses."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks, self.num_dropped = max_blocks, 0
        self._masks: dict[int, int] = {}
        self._held: dict[int, set[int]] = {}
        self._expected: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """The number of distinct blocks."""
        return len(self._masks)

    def add_replica(self, replica: int) -> None:
        """Begins a replica without blocks."""
        self._held[replica], self._expected[replica] = set(), set()

    def remove_replica(self, replica: int) -> None:
        """Forgets a replica and all its blocks."""
        blocks = self._held.pop(replica) | self._expected.pop(replica)
        self._clear_bits(replica, blocks)

    def held(self, replica: int) -> frozenset[int]:
        """The blocks that the replica reported."""
        return frozenset(self._held[replica])

    # -- reports of replicas --------------------------------------------------------------------------

    def change(self, replica: int, added: Iterable[int], removed: Iterable[int]) -> None:
        """Applies a batch of a replica."""
        held, expected, masks, bit = self._held[replica], self._expected[replica], self._masks, 1 << replica
        for block in removed:
            held.discard(block)
            if block not in expected:
                self._clear_bit(block, bit)
        for block in added:
            if len(held) >= self.max_blocks:
                self.num_dropped += 1
                continue
            held.add(block)
            masks[block] = masks.get(block, 0) | bit

    def replace(self, replica: int, blocks: Iterable[int]) -> None:
        """Applies a snapshot of a replica: it holds exactly these blocks."""
        new, old = set(blocks), self._held[replica]
        self.change(replica, new - old, old - new)

    # -- expectations ---------------------------------------------------------------------------------

    def expect(self, replica: int, blocks: Sequence[int]) -> Sequence[int]:
        """Counts on the blocks, which a request will compute on the replica. Returns those that were new."""
        masks, bit = self._masks, 1 << replica
        first = self._num_matched(blocks, bit)
        new = [block for block in blocks[first:] if not masks.get(block, 0) & bit]
        self._expected[replica].update(new)
        for block in new:
            masks[block] = masks.get(block, 0) | bit
        return new

    def stop_expecting(self, replica: int, blocks: Iterable[int]) -> None:
        """Ends the expectation of blocks that `expect` returned; those not reported meanwhile are gone."""
        if replica not in self._held:
            return
        held, expected, bit = self._held[replica], self._expected[replica], 1 << replica
        for block in blocks:
            if block in expected:
                expected.remove(block)
                if block not in held:
                    self._clear_bit(block, bit)

    # -- lookup ---------------------------------------------------------------------------------------

    def longest(self, blocks: Sequence[int], among: int) -> tuple[int, int]:
        """Returns (number of leading blocks, mask of the replicas of the mask `among` that have so many).

        (0, `among`) if none has the first block.
        """
        count = self._num_matched(blocks, among)
        return count, self._masks[blocks[count - 1]] & among if count else among

    def num_held_by(self, blocks: Sequence[int], replica: int) -> int:
        """The number of leading blocks that a replica has."""
        return self._num_matched(blocks, 1 << replica)

    def _num_matched(self, blocks: Sequence[int], among: int) -> int:
        get, low, high = self._masks.get, 0, len(blocks)
        if not high or not get(blocks[0], 0) & among:  # a miss is common, and so is a complete match
            return 0
        while low < high:
            middle = (low + high) // 2
            if get(blocks[middle], 0) & among:
                low = middle + 1
            else:
                high = middle
        return low

    def _clear_bits(self, replica: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._clear_bit(block, 1 << replica)

    def _clear_bit(self, block: int, bit: int) -> None:
        mask = self._masks.get(block, 0) & ~bit
        if mask:
            self._masks[block] = mask
        else:
            self._masks.pop(block, None)
