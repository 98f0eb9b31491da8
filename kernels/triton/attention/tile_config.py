"""Tile sizes and numbers of splits of the attention kernels, chosen by rules instead of autotuning.

A captured graph and a short first request leave no time for tuning, and a few rules come within a few percent of it
(arXiv 2511.11581, section 7). All functions depend on the GPU and the layer's shape only, and do not use Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from plait.kernels.layout import SHARED_ALIGN, AttentionShape, PrefixSharingCost
from plait.kernels.triton.support import MAX_QUERY_HEADS_PER_KV_HEAD

# Costs of the shared-prefix pass in bytes of one layer's KV that a GPU reads in the same time.
MIN_CASCADE_SAVING_BYTES = 32 << 20  # the additional pass, and merging: about 7 us on an H200
CASCADE_GROUP_COST_BYTES = 4 << 20  # each group


@dataclass(frozen=True)
class GpuSpec:
    """The properties of a GPU that the rules use."""

    capability: int  # compute capability times 10: 80, 90
    num_sms: int


@dataclass(frozen=True)
class TileConfig:
    """A kernel's tile and launch options."""

    rows: int  # packed (token, head) rows
    keys: int
    warps: int
    stages: int
    overlaps: bool = False  # prefill on Hopper: products run under the softmax, see `kv_loop.attend_unmasked_kv_range`


@cache
def gpu_spec(device: torch.device) -> GpuSpec:
    """Returns the device's properties; those of an H200 without a GPU (the interpreter, compilation ahead of time)."""
    if device.type != "cuda":
        return GpuSpec(90, 132)
    properties = torch.cuda.get_device_properties(device)
    return GpuSpec(properties.major * 10 + properties.minor, properties.multi_processor_count)


def padded_dim(head_dim: int) -> int:
    """Returns the channels of a tile: the next power of two, at least 16."""
    return max(16, _power_of_two(head_dim))


def group_size(shape: AttentionShape) -> int:
    """Returns the query heads per KV head. ValueError if not whole or above MAX_QUERY_HEADS_PER_KV_HEAD."""
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    if rest or not 1 <= group <= MAX_QUERY_HEADS_PER_KV_HEAD:
        raise ValueError(
            f"{shape.num_heads} query heads over {shape.num_kv_heads} KV heads: "
            f"from 1 to {MAX_QUERY_HEADS_PER_KV_HEAD} per KV head"
        )
    return group


def decode_tile_rows(shape: AttentionShape, max_q_len: int) -> int:
    """Returns the packed rows of a decode tile; rows with at most that // group new tokens are decode rows.

    One token of up to 16 heads fills the smallest matrix product. If every row of the batch has up to 8 tokens (a
    draft to be verified), the tile grows to hold them, up to 64 rows.
    """
    return min(64, max(16, _power_of_two(max_q_len * group_size(shape)))) if max_q_len <= 8 else 16


def decode_tile_config(gpu: GpuSpec, shape: AttentionShape, rows: int) -> TileConfig:
    """Returns the tile of the decode kernel, which is bound by memory bandwidth.

    A stage holds 16 KB of keys and 16 KB of values. Two or three programs share a multiprocessor, and their 100 KB in
    flight are several times what Little's law requires (25 KB at 4.8 TB/s and 700 ns).
    """
    row_bytes = padded_dim(shape.head_dim) * shape.cache_dtype.itemsize
    keys = min(64, max(16, 16384 // row_bytes))
    converts_slowly = shape.cache_dtype == torch.int8 or (shape.cache_dtype.itemsize == 1 and gpu.capability < 90)
    if converts_slowly and row_bytes >= 128:  # scales and conversions need registers too
        keys = 32
    return TileConfig(rows, keys, warps=4, stages=3 if keys * row_bytes > 8192 else 4)


def prefill_tile_config(gpu: GpuSpec, shape: AttentionShape, max_q_len: int) -> TileConfig:
    """Returns the tile of the prefill kernel, which is bound by arithmetic: the largest whose sums fit in registers.

    On Hopper, 64 or more rows per warp group allow wgmma. With 64 keys, scores and weights of two blocks fit in
    registers, so that products overlap with the softmax; without that, 128 keys keep the reads of operands below the
    bandwidth of shared memory (64 x 64 x 16 products read 128 bytes a clock).
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
    if hopper and item == 2 and gpu.capability < 100:
        return TileConfig(128, 64, warps=8, stages=3, overlaps=True)
    if hopper:
        return TileConfig(128, 128 if item == 2 else 64, warps=8, stages=2)
    return TileConfig(128, 64, warps=8, stages=3) if item == 2 else TileConfig(64, 64, warps=8, stages=2)


def shared_prefix_tile_config(gpu: GpuSpec, shape: AttentionShape, num_tokens: int) -> TileConfig:
    """Returns the tile of the shared-prefix kernel, in which all new tokens of a group read the prefix together."""
    config = prefill_tile_config(gpu, shape, num_tokens)
    if config.overlaps:
        return TileConfig(128, 128, warps=8, stages=2)
    return replace(config, keys=32) if padded_dim(shape.head_dim) > 128 else config


def num_extra_work_items(gpu: GpuSpec, shape: AttentionShape) -> int:
    """Returns the work items beyond one per row: those that fill the GPU with three programs per multiprocessor."""
    return -(-3 * gpu.num_sms // shape.num_kv_heads)


def num_prefix_splits(gpu: GpuSpec, shape: AttentionShape, num_tokens: int) -> int:
    """Returns the splits of a shared prefix with which the tiles of `num_tokens` tokens fill the GPU twice."""
    config = shared_prefix_tile_config(gpu, shape, num_tokens)
    tiles = -(-num_tokens * group_size(shape) // config.rows) * shape.num_kv_heads
    return max(1, min(32, -(-2 * gpu.num_sms // tiles)))


def prefix_sharing_cost(shape: AttentionShape, max_q_len: int) -> PrefixSharingCost:
    """Returns the cost of reading shared prefixes once, in a batch whose rows have at most `max_q_len` new tokens.

    Rows too long for the decode kernel do not take part: their tiles are full, so they are bound by arithmetic.
    """
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.cache_dtype.itemsize
    return PrefixSharingCost(
        align=SHARED_ALIGN,
        group_cost=-(-CASCADE_GROUP_COST_BYTES // token_bytes),
        min_saved_tokens=-(-MIN_CASCADE_SAVING_BYTES // token_bytes),
        max_row_tokens=decode_tile_rows(shape, max_q_len) // group_size(shape),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
