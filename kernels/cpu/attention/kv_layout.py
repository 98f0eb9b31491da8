"""How attention lays out queries, keys and values in a thread's workspace, and the copies that do it.

With bfloat16 products (AMX, AVX-512 BF16):

    keys       as in the cache, a position's channels side by side        bfloat16 [64, D]
    queries    pairs of channels, all lanes of a tile side by side        bfloat16 [D / 2, lanes, 2]
    values     pairs of positions, a pair's channels side by side         bfloat16 [32, D, 2]

Without them everything is float32: queries [lanes, D], keys transposed [D, 64], values [64, D].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Bool, Int, intrinsic

KV_BLOCK = 64  # positions of a block, the unit that is read from the cache
CHUNK_POSITIONS = 32  # positions whose products one matrix instruction sums
LANES = 16  # lanes that are computed together
NARROW_LANES = 4  # lanes of the narrow form, for a token that decodes alone
TRANSPOSE_4X4 = [4 * (i % 4) + i // 4 for i in range(v.LANES)]


def shuffled(b: Any, x: Any, y: Any, mask: list[int]) -> Any:
    """Returns the numbers of two vectors that a list selects."""
    return b.shuffle_vector(x, y, ir.Constant(v.vector(v.I32, len(mask)), mask))


@intrinsic
def pack_queries(b: Any, rows: Int, head_dim: Int, out: Int, out_stride: Int) -> None:
    """Transposes bfloat16 [16, D] to pairs of channels [D / 2, 16, 2], `out_stride` bytes from one pair to the next."""
    stride = b.shl(head_dim, v.I64(1))
    loop = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    source = b.add(rows, b.shl(loop.i, v.I64(6)))
    target = b.add(out, b.mul(loop.i, b.shl(out_stride, v.I64(4))))
    lanes = [v.load(b, b.add(source, b.mul(stride, v.I64(i))), v.I32X16) for i in range(LANES)]
    for i, pair in enumerate(v.transpose_16x16(b, lanes)):
        v.store(b, pair, b.add(target, b.mul(out_stride, v.I64(i))))
    loop.end()


# Zipping two vectors of 32 channels at once yields them in this order: the lower halves of their eights first.
_LOW, _HIGH = ([8 * q + i for q in range(4) for i in half] for half in (range(4), range(4, 8)))
_ZIPS = [ir.Constant(v.vector(v.I32, 2 * v.LANES), [x for i in half for x in (i, i + 32)]) for half in (_LOW, _HIGH)]
_CHANNEL_ORDER = [(_LOW + _HIGH).index(channel) for channel in range(32)]


@intrinsic
def pack_values(b: Any, rows: Int, stride: Int, head_dim: Int, pairs: Int, out: Int) -> None:
    """Zips bfloat16 rows [2 * pairs, D], `stride` bytes apart, to pairs of positions [pairs, D, 2].

    Each 32 channels come out permuted; `unpermute_channels` restores their order in the result.
    """
    loop = v.Loop(b, pairs)
    source = b.add(rows, b.mul(loop.i, b.shl(stride, v.I64(1))))
    target = b.add(out, b.mul(loop.i, b.shl(head_dim, v.I64(2))))
    parts = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    address = b.add(source, b.shl(parts.i, v.I64(6)))
    pair = [v.load(b, row, v.vector(v.I16, 2 * v.LANES)) for row in (address, b.add(address, stride))]
    for i, mask in enumerate(_ZIPS):
        v.store(b, b.shuffle_vector(*pair, mask), b.add(target, b.shl(parts.i, v.I64(7))), 64 * i)
    parts.end()
    loop.end()


@intrinsic
def unpermute_channels(b: Any, accumulators: Int, head_dim: Int) -> None:
    """Restores the channel order of one lane's accumulators, float32 [D] in the order of `pack_values`, in place."""
    loop = v.Loop(b, b.lshr(head_dim, v.I64(5)))
    address = b.add(accumulators, b.shl(loop.i, v.I64(7)))
    pair = [v.load(b, address, v.F32X16, 64 * i) for i in range(2)]
    for i in range(2):
        mask = ir.Constant(v.I32X16, _CHANNEL_ORDER[16 * i : 16 * i + 16])
        v.store(b, b.shuffle_vector(*pair, mask), address, 64 * i)
    loop.end()


@intrinsic
def are_consecutive(b: Any, pages: Int, chunks: Int) -> Bool:
    """Returns whether 32 * chunks int32 at an address count upwards one by one."""
    first = v.broadcast_load(b, pages, v.I32)
    loop = v.Loop(b, chunks, [v.constant(v.I32X16, 0)])
    different = loop.carried[0]
    for i in range(2):
        index = ir.Constant(v.I32X16, [16 * i + lane for lane in range(v.LANES)])
        expected = b.add(b.add(first, index), v.splat(b, b.trunc(b.shl(loop.i, v.I64(5)), v.I32)))
        actual = v.load(b, b.add(pages, b.shl(loop.i, v.I64(7))), v.I32X16, 64 * i)
        different = b.or_(different, b.xor(actual, expected))
    (different,) = loop.end([different])
    bits = b.bitcast(b.icmp_unsigned("!=", different, v.constant(v.I32X16, 0)), ir.IntType(16))
    return b.icmp_unsigned("==", bits, ir.Constant(bits.type, 0))


def _copy_each(b: Any, kind: Any, size: int, source: Any, stride: Any, out: Any, count: Any) -> None:
    """Copies `count` values of a type of LLVM, of `size` bytes, `stride` bytes apart, side by side."""
    loop = v.Loop(b, count)
    value = v.load(b, b.add(source, b.mul(loop.i, stride)), kind)
    v.store(b, value, b.add(out, b.mul(loop.i, v.I64(size))))
    loop.end()


@intrinsic
def copy(b: Any, address: Int, out: Int, count: Int) -> None:
    """Copies 64 * count bytes."""
    _copy_each(b, v.I32X16, 64, address, v.I64(64), out, count)


@intrinsic
def copy_halves(b: Any, address: Int, out: Int, count: Int) -> None:
    """Copies 32 * count bytes."""
    _copy_each(b, v.vector(v.I8, 32), 32, address, v.I64(32), out, count)


@intrinsic
def gather_floats(b: Any, address: Int, stride: Int, out: Int, count: Int) -> None:
    """Copies `count` float32, `stride` bytes apart, side by side."""
    _copy_each(b, v.I32, 4, address, stride, out, count)


@intrinsic
def bf16_to_f32(b: Any, address: Int, out: Int, count: Int) -> None:
    """Widens 16 * count bfloat16 to float32."""
    loop = v.Loop(b, count)
    narrow = v.load(b, b.add(address, b.mul(loop.i, v.I64(32))), v.vector(v.I16))
    wide = b.shl(b.zext(narrow, v.I32X16), v.constant(v.I32X16, 16))
    v.store(b, wide, b.add(out, b.mul(loop.i, v.I64(64))))
    loop.end()


def _dequantized(b: Any, address: Any, scale: Any, i: Any) -> Any:
    """The i-th 16 of a row of int8, times the float32 at `scale`."""
    integers = b.sext(v.load(b, b.add(address, b.mul(i, v.I64(16))), v.vector(v.I8)), v.I32X16)
    return b.fmul(b.sitofp(integers, v.F32X16), scale)


@intrinsic
def int8_to_bf16(b: Any, address: Int, scale: Int, out: Int, count: Int) -> None:
    """Dequantizes 32 * count int8 to bfloat16; `scale` is the address of their float32 scale."""
    scales = v.broadcast_load(b, scale)
    loop = v.Loop(b, count)
    first = b.shl(loop.i, v.I64(1))
    halves = [_dequantized(b, address, scales, i) for i in (first, b.add(first, v.I64(1)))]
    v.store(b, v.round_pair_to_bf16_bits(b, *halves), b.add(out, b.shl(loop.i, v.I64(6))))
    loop.end()


@intrinsic
def int8_to_f32(b: Any, address: Int, scale: Int, out: Int, count: Int) -> None:
    """Dequantizes 16 * count int8 to float32; `scale` is the address of their float32 scale."""
    scales = v.broadcast_load(b, scale)
    loop = v.Loop(b, count)
    v.store(b, _dequantized(b, address, scales, loop.i), b.add(out, b.mul(loop.i, v.I64(64))))
    loop.end()


@intrinsic
def zero_floats(b: Any, out: Int, count: Int) -> None:
    """Writes 16 * count float32 zeros."""
    loop = v.Loop(b, count)
    v.store(b, v.constant(v.F32X16, 0.0), b.add(out, b.shl(loop.i, v.I64(6))))
    loop.end()


def _each_line(b: Any, arguments: list[Any], visit: Callable[[Any], None]) -> None:
    """Visits the lines of 64 bytes of rows; `arguments` as of `prefetch_rows`."""
    address, stride, count, channels = arguments
    rows = v.Loop(b, count)
    row = b.add(address, b.mul(rows.i, stride))
    lines = v.Loop(b, b.lshr(channels, v.I64(5)))
    visit(b.add(row, b.shl(lines.i, v.I64(6))))
    lines.end()
    rows.end()


@intrinsic
def prefetch_rows(b: Any, address: Int, stride: Int, count: Int, channels: Int) -> None:
    """Prefetches `count` rows of bfloat16 [channels], `stride` bytes apart."""
    _each_line(b, [address, stride, count, channels], lambda line: v.prefetch(b, line))


@intrinsic
def touch_rows(b: Any, address: Int, stride: Int, count: Int, channels: Int) -> None:
    """Loads the rows of `prefetch_rows` in order and discards them, which starts the hardware prefetcher."""
    _each_line(
        b, [address, stride, count, channels], lambda line: b.load_atomic(v.pointer_at(b, line, v.I32), "monotonic", 4)
    )
