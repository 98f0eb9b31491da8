"""Vectors of 16 numbers that belong to lanes: of one position and 16 lanes, or of 4 positions and 4 lanes.

Of 4 positions, the lanes of the first come first: element 4 * position + lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK, LANES, NARROW_LANES, TRANSPOSE_4X4, shuffled
from plait.kernels.cpu.compiler.intrinsics import Int, OneOf, intrinsic

Lanes = Annotated[int, OneOf((LANES, NARROW_LANES))]
MASKED_SCORE = -1e30  # the score of a masked position


class LaneVectors(NamedTuple):
    """The form of vectors of 4 or of 16 lanes. `b` is the builder that code is appended to."""

    b: Any
    lanes: int

    @property
    def positions(self) -> int:
        """The positions of a vector."""
        return v.LANES // self.lanes

    def load(self, address: Any, kind: Any = v.F32) -> Any:
        """Loads one number of each lane, repeated for each position."""
        numbers = v.load(self.b, address, v.vector(kind, self.lanes))
        return shuffled(self.b, numbers, numbers, [i % self.lanes for i in range(v.LANES)])

    def load_of_positions(self, address: Any, kind: Any = v.F32, offset: int = 0) -> Any:
        """Loads one number of each position, repeated for each lane."""
        if self.positions == 1:
            return v.broadcast_load(self.b, address, kind, offset)
        numbers = v.load(self.b, address, v.vector(kind, self.positions), offset)
        return shuffled(self.b, numbers, numbers, [i // self.lanes for i in range(v.LANES)])

    def store(self, x: Any, address: Any) -> None:
        """Stores the numbers of the first position."""
        v.store(self.b, shuffled(self.b, x, x, [*range(self.lanes)]), address)

    def reduce(self, x: Any, combine: Any) -> Any:
        """Combines the positions: 0 with 2, 1 with 3, then both. Each position of the result is the same."""
        step = v.LANES // 2
        while step >= self.lanes:
            x = combine(x, shuffled(self.b, x, x, [(i + step) % v.LANES for i in range(v.LANES)]))
            step //= 2
        return x


class ProbsWriter(NamedTuple):
    """What an update of the online softmax does with the probabilities of a chunk."""

    group: int  # vectors that are written together
    write: Callable[[Any, int, list[Any]], None]  # (number of the chunk, the group's first vector, probabilities)
    end: Callable[[Any], None] = lambda chunk: None  # after all groups of a chunk


def sum_partial_sums(b: Any, sums: Sequence[Any], add: Any) -> Any:
    """Reduces vectors of 4 positions, each [lane, 4 partial sums], to one [position, lane]: neighbours first."""
    even, odd = (
        [4 * quarter + (i if i < 4 else v.LANES + i - 4) for quarter in range(4) for i in half]
        for half in ((0, 2, 4, 6), (1, 3, 5, 7))
    )
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [add(shuffled(b, x, y, even), shuffled(b, x, y, odd)) for x, y in pairs]
    return shuffled(b, sums[0], sums[0], TRANSPOSE_4X4)


def _begin_positions(vectors: LaneVectors, arguments: Sequence[Any], carried: Sequence[Any] = ()) -> tuple[Any, Any]:
    """Begins a loop over a block's vectors; returns it, and which lanes see the position of each number.

    `arguments`: those of `apply_mask` from `base` on.
    """
    b, (base, kv_begins, kv_ends) = vectors.b, arguments
    bounds = [vectors.load(address, v.I32) for address in (kv_begins, kv_ends)]
    offsets = ir.Constant(v.I32X16, [i // vectors.lanes for i in range(v.LANES)])
    loop = v.Loop(b, v.I64(KV_BLOCK // vectors.positions), carried)
    first = b.add(base, b.mul(loop.i, v.I64(vectors.positions)))
    position = b.add(v.splat(b, b.trunc(first, v.I32)), offsets)
    return loop, b.and_(b.icmp_signed(">=", position, bounds[0]), b.icmp_signed("<", position, bounds[1]))


@intrinsic
def apply_mask(b: Any, lanes: Lanes, scores: Int, base: Int, kv_begins: Int, kv_ends: Int) -> None:
    """Masks scores [64, lanes] of positions from `base` on, outside each lane's [kv_begins, kv_ends), int32 [lanes].

    `lanes` is 4 or 16.
    """
    positions = base, kv_begins, kv_ends
    loop, is_seen = _begin_positions(LaneVectors(b, lanes), positions)
    row = b.add(scores, b.shl(loop.i, v.I64(6)))
    v.store(b, b.select(is_seen, v.load(b, row, v.F32X16), v.constant(v.F32X16, MASKED_SCORE)), row)
    loop.end()


@intrinsic
def largest_visible(b: Any, lanes: Lanes, numbers: Int, base: Int, kv_begins: Int, kv_ends: Int, out: Int) -> None:
    """Writes the largest of float32 [64] at the positions that each lane sees (`apply_mask`) to `out` [lanes].

    The numbers are >= 0; a NaN counts as the largest.
    """
    positions = base, kv_begins, kv_ends
    vectors, zero = LaneVectors(b, lanes), v.constant(v.I32X16, 0)
    loop, is_seen = _begin_positions(vectors, positions, [zero])
    offset = b.mul(loop.i, v.I64(4 * vectors.positions))
    seen = b.select(is_seen, vectors.load_of_positions(b.add(numbers, offset), v.I32), zero)
    (largest,) = loop.end([v.larger_bits(b, seen, loop.carried[0])])
    vectors.store(vectors.reduce(largest, lambda x, y: v.larger_bits(b, x, y)), out)
