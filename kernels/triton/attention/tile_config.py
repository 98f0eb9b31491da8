"""Block shapes and numbers of pieces for the attention kernels, by rules instead of tuning at run time.

A captured graph and a short first request leave no time to tune, and a few rules come within a few percent of it
(arXiv 2511.11581, section 7). Pure functions of the chip and the shape; nothing here touches Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from plait.kernels.layout import SHARED_ALIGN, AttentionShape, PrefixSharingCost

MAX_QUERY_HEADS_PER_KV_HEAD = 16  # query heads of one KV head
MIN_CASCADE_SAVING_BYTES = (
    32 << 20
)  # of one layer's KV: what a GPU reads in the time that two more passes take, 7 us of an H200
CASCADE_GROUP_COST_BYTES = 4 << 20  # and that one more group takes of them


@dataclass(frozen=True)
class GpuSpec:
    """What of a GPU the rules look at."""

    capability: int  # 80, 90
    num_sms: int


@dataclass(frozen=True)
class TileConfig:
    """One kernel's tile and how it is run."""

    rows: int  # packed (token, head) rows
    keys: int
    warps: int
    stages: int


@cache
def gpu_spec(device: torch.device) -> GpuSpec:
    """The device's chip; for what is no GPU (the interpreter, compiling ahead) an H200."""
    if device.type != "cuda":
        return GpuSpec(90, 132)
    seen = torch.cuda.get_device_properties(device)
    return GpuSpec(seen.major * 10 + seen.minor, seen.multi_processor_count)


def padded_dim(head_dim: int) -> int:
    """Channels of a tile: the next power of two, at least 16."""
    return max(16, _power_of_two(head_dim))


def group_size(shape: AttentionShape) -> int:
    """Query heads per KV head. ValueError if it is not whole or above MAX_QUERY_HEADS_PER_KV_HEAD."""
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    if rest or not 1 <= group <= MAX_QUERY_HEADS_PER_KV_HEAD:
        raise ValueError(
            f"{shape.num_heads} query heads over {shape.num_kv_heads} KV heads: from 1 to {MAX_QUERY_HEADS_PER_KV_HEAD} per KV head"
        )
    return group


def decode_tile_rows(shape: AttentionShape, max_q_len: int) -> int:
    """Packed rows of a tile for narrow rows, which are those with rows // group tokens at most.

    One token of up to 16 heads fills the smallest matrix product; if every row of the batch has up to 8 tokens (a
    draft to be verified), the tile grows to hold them, up to 64 rows.
    """
    return min(64, max(16, _power_of_two(max_q_len * group_size(shape)))) if max_q_len <= 8 else 16


def decode_tile_config(gpu: GpuSpec, shape: AttentionShape, rows: int) -> TileConfig:
    """The kernel for narrow rows, which is bound by reading.

    16 KB of keys and as many of values per stage: two or three such programs share a multiprocessor, and the
    100 KB that they have on the way are several times what Little's law asks of it (25 KB at 4.8 TB/s and 700 ns).
    """
    row_bytes = padded_dim(shape.head_dim) * shape.cache_dtype.itemsize
    keys = min(64, max(16, 16384 // row_bytes))
    if shape.cache_dtype == torch.int8 and row_bytes >= 128:  # its scales and conversions take registers too
        keys = 32
    return TileConfig(rows, keys, warps=4, stages=3 if keys * row_bytes > 8192 else 4)


def prefill_tile_config(gpu: GpuSpec, shape: AttentionShape, max_q_len: int) -> TileConfig:
    """The kernel for prompts, which is bound by arithmetic: the largest tiles whose sums stay in registers.

    On Hopper 64 rows or more per warp group let it use wgmma, and 128 keys keep its operand reads under what shared
    memory gives (64 x 64 x 16 products would read 128 bytes a clock).
    """
    dim, item = padded_dim(shape.head_dim), shape.cache_dtype.itemsize
    hopper = gpu.capability >= 90
    rows = 128 if max_q_len * group_size(shape) > 64 else 64
    if item == 4:
        return TileConfig(32, 32, warps=4, stages=2)
    if dim > 128:
        rows = rows if hopper else 64
        return TileConfig(rows, 64 if hopper and item == 2 else 32, warps=8, stages=2)
    if rows == 64:
        return TileConfig(64, 64, warps=4, stages=2)
    if hopper:
        return TileConfig(128, 128 if item == 2 else 64, warps=8, stages=2)
    return TileConfig(128, 64, warps=8, stages=3) if item == 2 else TileConfig(64, 64, warps=8, stages=2)


def shared_prefix_tile_config(gpu: GpuSpec, shape: AttentionShape, num_tokens: int) -> TileConfig:
    """The kernel for shared prefixes, which all new tokens of a group go over together."""
    blocks = prefill_tile_config(gpu, shape, num_tokens)
    return replace(blocks, keys=32) if padded_dim(shape.head_dim) > 128 else blocks


def num_extra_work_items(gpu: GpuSpec, shape: AttentionShape) -> int:
    """Pieces beyond one per row: as many as fill the chip with three programs on each multiprocessor."""
    return -(-3 * gpu.num_sms // shape.num_kv_heads)


def num_prefix_splits(gpu: GpuSpec, shape: AttentionShape, num_tokens: int) -> int:
    """Into how many pieces a shared prefix is cut, so that the tiles of `num_tokens` tokens fill the chip twice."""
    blocks = shared_prefix_tile_config(gpu, shape, num_tokens)
    tiles = -(-num_tokens * group_size(shape) // blocks.rows) * shape.num_kv_heads
    return max(1, min(32, -(-2 * gpu.num_sms // tiles)))


def prefix_sharing_cost(shape: AttentionShape, max_q_len: int) -> PrefixSharingCost:
    """When reading shared prefixes once is worth its passes, in a batch whose rows bring `max_q_len` tokens at most.

    Rows too wide for the decode kernel read for themselves: their tiles are full, so arithmetic is what takes the time.
    """
    token = 2 * shape.num_kv_heads * shape.head_dim * shape.cache_dtype.itemsize
    max_row_tokens = decode_tile_rows(shape, max_q_len) // group_size(shape)
    return PrefixSharingCost(
        SHARED_ALIGN, -(-CASCADE_GROUP_COST_BYTES // token), -(-MIN_CASCADE_SAVING_BYTES // token), max_row_tokens
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
