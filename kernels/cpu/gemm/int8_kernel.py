"""The inner kernel of products in 8 bits: tiles of outputs for any number of rows of int8 activations.

`int8_blocks` multiplies a block of 32 inputs. The blocks of a row are added in order, so a row's bits depend neither on
the other rows nor on the CPU's instructions. Weights are laid out as `layouts` describes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.gemm.block_values import Pieces, Prefetch, block_place, prefetch_share, unit_scales
from plait.kernels.cpu.gemm.int8_blocks import (
    AVX2,
    AVX512_VNNI,
    AVX_VNNI,
    INT8_ISA,
    ActivationRows,
    add_block,
    leaves_unit_scale,
    unit_corrections,
)
from plait.kernels.cpu.gemm.layouts import PackedLayout

# rows, at least -> vectors of outputs that are computed together, so that their sums stay in registers
VECTORS_PER_PASS = {AVX512_VNNI: {1: 2}, AVX_VNNI: {1: 4, 2: 2, 4: 1}, AVX2: {1: 4, 2: 2, 4: 1}}
MAX_ROWS = 6 if INT8_ISA is AVX512_VNNI else 4  # rows whose sums fit into the registers (`_max_rows`)
Prefetches = dict[int, Prefetch]  # rows, at least -> how their weights are prefetched
# To the first-level cache: the longer a block takes, the more of its prefetches come in time.
NEAR = {1: Prefetch(6144), 2: Prefetch(10240), 6: Prefetch(12288)}
if INT8_ISA is AVX2:
    NEAR = dict.fromkeys((1, 2), Prefetch(8192))
# Weights that one row reads in the order of memory come by the processor's own prefetcher. Six rows at a time are 7%
# slower with prefetches to the second level, in pages of 4 KB.
FAR = {1: Prefetch(0), 2: Prefetch(16384, level=2), 6: NEAR[max(NEAR)]}
CHUNK_INPUTS = 256  # a superblock, or as many blocks
UNCHUNKED_ROWS = 64  # rows, at least, whose products do not go by chunks


class TileChunk(NamedTuple):
    """`count` units of the tile at address `tile`, from its unit `first` on."""

    tile: Any
    first: Any
    count: Any


class ProductArgs(NamedTuple):
    """The arguments of a product, int64 addresses and numbers: of builders' values here, of numbers in the callers.

    It multiplies `num_tiles` tiles of a packed weight with `rows` rows of int8 activations, and writes a float32 for
    each output and row.
    """

    tiles: Any  # the first tile
    tile_stride: Any  # bytes from one tile to the next
    num_tiles: Any
    x: Any  # int8 [rows, 32 * blocks], in rows of `x_stride` bytes
    x_stride: Any
    scales: Any  # float32 [rows, blocks]
    block_sums: Any
    half_sums: Any
    blocks: Any
    out: Any  # in rows of `out_stride` bytes, the next tile's numbers `out_tile_stride` bytes further
    out_stride: Any
    out_tile_stride: Any
    rows: Any
    pieces: Any = 0  # addresses of memory that is prefetched beside the weights of several rows, int64
    num_pieces: Any = 0

    @classmethod
    def at(cls, b: Any, address: Any) -> ProductArgs:
        """The arguments in memory at an address, in generated code."""
        return cls(*(v.load(b, address, v.I64, 8 * i) for i in range(len(cls._fields))))


def _max_rows(layout: PackedLayout) -> int:
    """Returns how many rows are multiplied at a time: fewer where a unit has sums of its own."""
    return min(MAX_ROWS, 4) if leaves_unit_scale(layout) else MAX_ROWS


def _for_rows(settings: dict[int, Any], rows: int) -> Any:
    """Returns the setting for a number of rows, of those that begin at a number of rows each."""
    return settings[max(least for least in settings if least <= rows)]


def generate_product(b: Any, layout: PackedLayout, args: ProductArgs, prefetches: Prefetches) -> None:
    """Generates the product: a loop over the tiles, and in it as many rows at a time as registers hold.

    A single row has code of its own: it waits for memory, and without chunks it reads 5% faster.
    """
    with b.if_else(b.icmp_signed("==", args.rows, v.I64(1))) as (one_row, several_rows):
        with one_row:
            generate_tiles(b, layout, args, 1, prefetches)
        with several_rows:
            prefetches = _with_pieces(b, prefetches, args)
            tiles, tile, out = _begin_tiles(b, args)
            units = b.udiv(args.blocks, v.I64(layout.blocks))
            _generate_chunks(b, layout, tile, out, args, units, prefetches)
            tiles.end()


def _with_pieces(b: Any, prefetches: Prefetches, args: ProductArgs) -> Prefetches:
    """Adds the pieces of the arguments."""
    current = v.allocate_on_stack(b, v.I64)
    b.store(args.pieces, current)
    pieces = Pieces(current, b.add(args.pieces, b.mul(args.num_pieces, v.I64(8))))
    return {rows: how._replace(pieces=pieces) for rows, how in prefetches.items()}


def generate_tiles(b: Any, layout: PackedLayout, args: ProductArgs, rows: int, prefetches: Prefetches) -> None:
    """Generates a loop over the tiles, each of which is multiplied with so many rows at a time, without chunks."""
    tiles, tile, out = _begin_tiles(b, args)
    chunk = TileChunk(tile, v.I64(0), b.udiv(args.blocks, v.I64(layout.blocks)))
    _generate_passes(b, layout, chunk, out, args, [v.I64(i) for i in range(rows)], prefetches)
    tiles.end()


def _begin_tiles(b: Any, args: ProductArgs) -> tuple[v.Loop, Any, Any]:
    """Begins a loop over the tiles; returns it, and the addresses of its tile and of the tile's results."""
    loop = v.Loop(b, args.num_tiles)
    tile = b.add(args.tiles, b.mul(loop.i, args.tile_stride))
    return loop, tile, b.add(args.out, b.mul(loop.i, args.out_tile_stride))


def _generate_chunks(
    b: Any, layout: PackedLayout, tile: Any, out: Any, args: ProductArgs, units: Any, prefetches: Prefetches
) -> None:
    """Generates a loop over chunks of a tile's `units`, in which all rows are multiplied with the same chunk.

    Rows that do not fit into the registers find a chunk in the first-level cache once the first rows have read it. So
    memory is read as evenly as weights are multiplied, and not only during the first pass of a tile.
    """
    least = v.I64(_max_rows(layout) + 1)
    is_chunked = b.icmp_unsigned("<", b.sub(args.rows, least), b.sub(v.I64(UNCHUNKED_ROWS), least))
    chunk = b.select(is_chunked, v.I64(CHUNK_INPUTS // layout.unit_inputs), units)
    loop = v.Loop(b, b.udiv(b.add(units, b.sub(chunk, v.I64(1))), chunk))
    first = b.mul(loop.i, chunk)
    rest = b.sub(units, first)
    count = b.select(b.icmp_signed("<", rest, chunk), rest, chunk)
    _generate_rows(b, layout, TileChunk(tile, first, count), out, args, prefetches)
    loop.end()


def _generate_rows(
    b: Any, layout: PackedLayout, chunk: TileChunk, out: Any, args: ProductArgs, prefetches: Prefetches
) -> None:
    """Generates a loop for each number of rows that are multiplied at a time, the largest first."""
    row: Any = v.I64(0)
    for count in sorted({_max_rows(layout), 4, 2, 1}, reverse=True):
        head, body, after = (b.append_basic_block(f"rows{count}_{name}") for name in ("head", "body", "after"))
        before = b.block
        b.branch(head)
        b.position_at_end(head)
        current = b.phi(v.I64)
        current.add_incoming(row, before)
        b.cbranch(b.icmp_signed(">=", b.sub(args.rows, current), v.I64(count)), body, after)
        b.position_at_end(body)
        _generate_passes(b, layout, chunk, out, args, [b.add(current, v.I64(i)) for i in range(count)], prefetches)
        current.add_incoming(b.add(current, v.I64(count)), b.block)
        b.branch(head)
        b.position_at_end(after)
        row = current


def _generate_passes(
    b: Any, layout: PackedLayout, chunk: TileChunk, out: Any, args: ProductArgs, row_indices: list[Any],
    prefetches: Prefetches,
) -> None:  # fmt: skip
    """Generates the products of a chunk with these rows, for as many outputs at a time as registers hold."""
    bases, stride = (args.x, args.scales, args.block_sums, args.half_sums), b.mul(args.blocks, v.I64(4))
    rows = ActivationRows(
        *(
            [b.add(base, b.mul(row, step)) for row in row_indices]
            for base, step in zip(bases, (args.x_stride, stride, stride, stride), strict=True)
        )
    ).at_block(b, b.mul(chunk.first, v.I64(layout.blocks)))
    targets = [b.add(out, b.mul(row, args.out_stride)) for row in row_indices]
    of_tile = layout.outputs // INT8_ISA.lanes
    vectors = min(of_tile, _for_rows(VECTORS_PER_PASS[INT8_ISA], len(row_indices)))
    for first in range(0, of_tile, vectors):
        how = Prefetch(0) if first else _for_rows(prefetches, len(row_indices))  # once for all vectors of a tile
        _generate_pass(b, layout, chunk, rows, range(first, first + vectors), targets, how)


def _generate_pass(
    b: Any, layout: PackedLayout, chunk: TileChunk, rows: ActivationRows, parts: range, targets: list[Any],
    how: Prefetch,
) -> None:  # fmt: skip
    """Generates the code for the vectors `parts` of the tile's outputs, and as many rows as there are targets.

    It adds the products of a chunk to the sums at the targets.
    """
    lanes, count = INT8_ISA.lanes, len(parts)
    floats = v.vector(v.F32, lanes)
    start = b.add(chunk.tile, b.mul(chunk.first, v.I64(layout.unit_bytes)))
    begins, zero = b.icmp_signed("==", chunk.first, v.I64(0)), v.constant(floats, 0.0)
    before = [v.load(b, target, floats, 4 * lanes * part) for target in targets for part in parts]
    loop = v.Loop(b, chunk.count, [b.select(begins, zero, sum_) for sum_ in before])
    unit = b.add(start, b.mul(loop.i, v.I64(layout.unit_bytes)))
    at_unit = rows.at_block(b, b.mul(loop.i, v.I64(layout.blocks)))
    for i, sum_ in enumerate(loop.end(_add_unit(b, layout, unit, at_unit, parts, loop.carried, how))):
        v.store(b, sum_, targets[i // count], 4 * lanes * parts[i % count])


def _add_unit(
    b: Any, layout: PackedLayout, unit: Any, rows: ActivationRows, parts: range, sums: list[Any], how: Prefetch
) -> list[Any]:
    """Returns the sums with the products of a unit added; the vectors `parts` of each row follow each other."""
    scales = [] if layout.is_float else [unit_scales(b, layout, unit, part, INT8_ISA.lanes) for part in parts]
    if layout.blocks == 1:
        place = block_place(b, layout, unit, None)
        prefetch_share(b, layout, place, how)
        return add_block(b, layout, place, rows, scales, parts, sums)
    scales_last = leaves_unit_scale(layout)
    if scales_last and len(rows.quants) > 1:
        rows = rows._replace(half_sums=unit_corrections(b, layout, rows.half_sums))
    loop = v.Loop(b, v.I64(layout.blocks), [v.constant(x.type, 0.0) for x in sums] if scales_last else sums)
    place = block_place(b, layout, unit, loop.i)
    prefetch_share(b, layout, place, how)
    added = loop.end(add_block(b, layout, place, rows.at_block(b, loop.i), scales, parts, loop.carried))
    if not scales_last:
        return added
    return [v.fma(b, x, scales[i % len(parts)].scale, sums[i]) for i, x in enumerate(added)]
