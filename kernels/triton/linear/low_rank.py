"""Adds the low-rank updates of adapters to a product, different ones for different rows: gather, shrink and expand.

The rows of a step are sorted by adapter once (`grouped_matmul.sort_by_expert`). For each product, one kernel writes the
terms of blocks of rows with one adapter, x @ down.T in float32, and a second one adds terms @ up.T + bias to the
outputs, as in Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285). Adapters of any rank share a launch: programs
read ranks and addresses in the table (`low_rank_table`), and those with nothing to do return. The host reads nothing,
so steps are captured in graphs, which later steps replay with other adapters in the slots.

Every output has one writer and a fixed order of sums. Terms are rounded to the dtype of x before they are multiplied,
as in a model that computes them as layers of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels import low_rank_table
from plait.kernels.low_rank_table import COLUMNS, RANK_STEP
from plait.kernels.operators import ExpertRouting
from plait.kernels.triton.linear.grouped_matmul import sort_by_expert

HEADER, PIECE = tl.constexpr(low_rank_table.HEADER), tl.constexpr(low_rank_table.PIECE)
BR = tl.constexpr(RANK_STEP)
FEW_ROWS = 128  # of a step; with more, blocks have 64 rows
RANK_PROGRAMS = 8  # of a block; each takes every eighth tile of ranks
BLOCK_K = 128
MAX_SPLITS = 4  # of the channels, for steps of at most FEW_ROWS rows, which have few blocks


@triton.jit(do_not_specialize=["num_rows", "product_at"])
def _shrink(
    x_ptr,
    table_ptr,
    terms_ptr,
    rows_ptr,
    block_slots_ptr,
    num_rows,
    channels,
    split_channels,
    x_stride,
    slot_stride,
    product_at,
    terms_stride,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """terms[split, row, rank]: the sum over a split of the channels."""
    block = tl.program_id(0)
    slot = tl.load(block_slots_ptr + block)
    if slot < 0:
        return
    entry = table_ptr + slot.to(tl.int64) * slot_stride + product_at
    ranks = tl.multiple_of(tl.load(entry).to(tl.int32), 16)
    down = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    row = tl.load(rows_ptr + block * BM + tl.arange(0, BM)).to(tl.int64)
    real = row < num_rows
    begin = tl.program_id(2) * split_channels
    end = tl.minimum(channels, begin + split_channels)
    to = terms_ptr + (tl.program_id(2).to(tl.int64) * num_rows + row)[None, :] * terms_stride
    k = tl.arange(0, BK)
    x_at = x_ptr + row[None, :] * x_stride + k[:, None]  # [BK, BM]
    for first in range(tl.program_id(1) * BR, ranks, tl.num_programs(1) * BR):
        rank = first + tl.arange(0, BR)
        down_at = down + rank[:, None].to(tl.int64) * channels + k[None, :]  # [BR, BK]
        acc = tl.zeros((BR, BM), tl.float32)
        for start in range(begin, end, BK):
            there = start + k < end
            w = tl.load(down_at + start, mask=there[None, :], other=0.0)
            x = tl.load(x_at + start, mask=there[:, None] & real[None, :], other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")
        tl.store(to + rank[:, None], acc, mask=real[None, :])


@triton.jit(do_not_specialize=["num_rows", "product_at"])
def _gather(
    ids_ptr,
    table_ptr,
    terms_ptr,
    rows_ptr,
    block_slots_ptr,
    out_ptr,
    num_rows,
    slot_stride,
    product_at,
    terms_stride,
    BM: tl.constexpr,
):
    """The terms of embeddings: row `token id` of down [V, R]."""
    block = tl.program_id(0)
    slot = tl.load(block_slots_ptr + block)
    if slot < 0:
        return
    entry = table_ptr + slot.to(tl.int64) * slot_stride + product_at
    ranks = tl.multiple_of(tl.load(entry).to(tl.int32), 16)
    down = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
    row = tl.load(rows_ptr + block * BM + tl.arange(0, BM)).to(tl.int64)
    real = row < num_rows
    token = tl.load(ids_ptr + row, mask=real, other=0).to(tl.int64)
    for first in range(0, ranks, BR):
        rank = first + tl.arange(0, BR)[None, :]
        terms = tl.load(down + token[:, None] * ranks + rank, mask=real[:, None], other=0.0)
        tl.store(terms_ptr + row[:, None] * terms_stride + rank, terms.to(tl.float32), mask=real[:, None])


@triton.jit(do_not_specialize=["num_rows", "product_at"])
def _expand(
    terms_ptr,
    table_ptr,
    out_ptr,
    rows_ptr,
    block_slots_ptr,
    num_rows,
    slot_stride,
    product_at,
    terms_stride,
    out_stride,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Adds each piece's terms @ up.T + bias to a tile of outputs."""
    block = tl.program_id(0)
    slot = tl.load(block_slots_ptr + block)
    if slot < 0:
        return
    entry = table_ptr + slot.to(tl.int64) * slot_stride + product_at
    num_pieces = tl.load(entry + 1).to(tl.int32)
    if num_pieces == 0:
        return
    dtype = out_ptr.dtype.element_ty
    row = tl.load(rows_ptr + block * BM + tl.arange(0, BM)).to(tl.int64)
    real = row < num_rows
    first_n = tl.program_id(1) * BN
    n = first_n + tl.arange(0, BN)
    k = tl.arange(0, BR)
    acc = tl.zeros((BN, BM), tl.float32)
    changed = n < 0
    for piece in range(num_pieces):
        at = entry + HEADER + piece * PIECE
        begin, end = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)
        ranks = tl.multiple_of(tl.load(at + 3).to(tl.int32), 16)
        up = tl.multiple_of(tl.load(at + 4).to(tl.pointer_type(dtype)), 16)
        bias = tl.load(at + 5)
        inside = (n >= begin) & (n < end)
        changed = changed | inside
        up_at = up + (n - begin)[:, None].to(tl.int64) * ranks + k[None, :]  # [BN, BR]
        first = tl.multiple_of(tl.load(at + 2).to(tl.int32), 16)
        terms_at = terms_ptr + row[None, :] * terms_stride + first + k[:, None]  # [BR, BM]
        meets = (begin < first_n + BN) & (end > first_n)
        for start in range(0, tl.where(meets, ranks, 0), BR):
            w = tl.load(up_at + start, mask=inside[:, None], other=0.0)
            terms = tl.load(terms_at + start, mask=real[None, :], other=0.0)
            for split in tl.static_range(1, SPLITS):
                of_split = terms_at + start + split * num_rows.to(tl.int64) * terms_stride
                terms += tl.load(of_split, mask=real[None, :], other=0.0)
            acc = tl.dot(w, terms.to(dtype), acc, input_precision="ieee")
        bias_at = bias.to(tl.pointer_type(dtype)) + (n - begin)
        acc += tl.load(bias_at, mask=inside & (bias != 0), other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + row[None, :] * out_stride + n[:, None]
    writes = changed[:, None] & real[None, :]
    out = tl.load(out_at, mask=writes, other=0.0).to(tl.float32)
    tl.store(out_at, (out + acc).to(dtype), mask=writes)


def group_rows(slots: torch.Tensor, num_slots: int) -> ExpertRouting:
    """Sorts the rows of a step by the slots [T] int32 of their adapters; rows with -1 are left out."""
    return sort_by_expert(slots, num_slots, 16 if len(slots) <= FEW_ROWS else 64)


def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    table: torch.Tensor,
    product: int,
    groups: ExpertRouting,
    num_terms: int,
) -> None:
    """Implements `AddLowRankOp`. Raises ValueError for shapes, strides or dtypes that do not fit."""
    is_embedding = x.dim() == 1
    if {len(x), len(out)} != {groups.num_slots} or out.stride(1) != 1 or x.stride(-1) != 1:
        raise ValueError(f"expected {groups.num_slots} rows, not x {tuple(x.shape)} and out {tuple(out.shape)}")
    if table.shape[2:] != (COLUMNS,) or not table.is_contiguous() or num_terms % RANK_STEP:
        raise ValueError(f"a table has {COLUMNS} columns, and terms are a multiple of {RANK_STEP}")
    if not is_embedding and x.dtype != out.dtype:
        raise ValueError(f"inputs of {x.dtype} do not fit outputs of {out.dtype}")
    rows, (_, outs), block = groups.num_slots, out.shape, groups.block
    if not rows:
        return
    splits = 1 if is_embedding or rows > FEW_ROWS else max(1, min(MAX_SPLITS, x.shape[1] // (4 * BLOCK_K)))
    terms = torch.empty((splits, rows, num_terms), dtype=torch.float32, device=out.device)
    described = (rows, table.stride(0), product * COLUMNS, num_terms)
    blocks = len(groups.block_experts)
    if is_embedding:
        _gather[(blocks,)](
            x, table, terms, groups.slots, groups.block_experts, out, *described, BM=block, num_warps=4
        )  # fmt: skip
    else:
        channels = x.shape[1]
        split_channels = triton.cdiv(triton.cdiv(channels, splits), BLOCK_K) * BLOCK_K
        _shrink[(blocks, RANK_PROGRAMS, splits)](
            x, table, terms, groups.slots, groups.block_experts, rows, channels, split_channels, x.stride(0),
            *described[1:], BM=block, BK=BLOCK_K, num_warps=4, num_stages=4,
        )  # fmt: skip
    block_n = 128 if block == 16 else 64
    _expand[(blocks, triton.cdiv(outs, block_n))](
        terms, table, out, groups.slots, groups.block_experts, *described, out.stride(0),
        SPLITS=splits, BM=block, BN=block_n, num_warps=4, num_stages=2,
    )  # fmt: skip
