"""Matrix products for mixtures of experts: sort tokens by expert, multiply each block by its expert, combine.

Nothing is read back from the device: the grid has as many blocks as any routing could need, and unused blocks return
at once. Every result has one writer and a fixed order of sums, so a token's output does not depend on the experts of
other tokens. The tile is transposed as in quantized_matmul: output channels are the tensor core's rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plait.kernels.operators import ExpertRouting, max_num_blocks

SCAN = 1024  # slots that the sort reads at a time


class GroupedMatmulConfig(NamedTuple):
    """The tile of a program."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def routing_block_size(num_slots: int, num_experts: int) -> int:
    """Returns the slots per block: an expert's mean, at least 16 (a tensor core's tile), at most 128."""
    mean = triton.cdiv(num_slots, num_experts)
    return max(16, min(128, int(triton.next_power_of_2(mean))))


def grouped_matmul_config(block_m: int) -> GroupedMatmulConfig:
    """Returns deep pipelines for few rows, which are bound by memory, and two warp groups on a large tile for many."""
    if block_m <= 32:
        return GroupedMatmulConfig(64, 128, 4, 4)
    return GroupedMatmulConfig(128, 64, 4 if block_m <= 64 else 8, 4 if block_m <= 64 else 3)


@triton.jit(do_not_specialize=["num_slots"])
def _count_slots(ids_ptr, counts_ptr, num_slots, SCAN: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros((SCAN,), tl.int32)
    for start in range(0, num_slots, SCAN):
        slot = start + tl.arange(0, SCAN)
        total += (tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _place_slots(
    ids_ptr,
    counts_ptr,
    slots_ptr,
    block_experts_ptr,
    num_slots,
    num_blocks,
    num_experts,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """One program per expert writes its slots and blocks; one more marks the unused blocks."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    blocks = (tl.load(counts_ptr + experts, mask=experts < num_experts, other=0) + (BLOCK - 1)) // BLOCK
    first = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    own_blocks = tl.sum(tl.where(experts == expert, blocks, 0), axis=0)
    last = tl.where(expert < num_experts, first + own_blocks, num_blocks)
    owner = tl.where(expert < num_experts, expert, -1)
    for start in range(first, last, SCAN):
        block = start + tl.arange(0, SCAN)
        tl.store(block_experts_ptr + block, tl.zeros((SCAN,), tl.int32) + owner, mask=block < last)
    if own_blocks > 0:
        seen = first * BLOCK
        for start in range(0, num_slots, SCAN):
            slot = start + tl.arange(0, SCAN)
            match = (tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1) == expert).to(tl.int32)
            to = seen + tl.cumsum(match, axis=0) - match
            tl.store(slots_ptr + to, slot, mask=match == 1)
            seen += tl.sum(match, axis=0)
        rest = seen + tl.arange(0, BLOCK)
        tl.store(slots_ptr + rest, tl.zeros((BLOCK,), tl.int32) + num_slots, mask=rest < last * BLOCK)


@triton.jit
def _grouped_matmul(
    x_ptr,
    weights_ptr,
    out_ptr,
    slots_ptr,
    block_experts_ptr,
    num_slots,
    outs,
    channels,
    slots_per_row,
    x_stride,
    out_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    slot = tl.load(slots_ptr + block * BM + tl.arange(0, BM))
    real = slot < num_slots
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x_ptr + (slot // slots_per_row)[None, :].to(tl.int64) * x_stride + k[:, None]  # [BK, BM]
    w_at = weights_ptr + (expert.to(tl.int64) * outs + n)[:, None] * channels + k[None, :]  # [BN, BK]
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, channels, BK):
        there = start + k < channels
        w = tl.load(w_at + start, mask=(n < outs)[:, None] & there[None, :], other=0.0)
        x = tl.load(x_at + start, mask=there[:, None] & real[None, :], other=0.0)
        acc = tl.dot(w, x, acc)
    to = out_ptr + slot[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(n < outs)[:, None] & real[None, :])


@triton.jit
def _combine(
    results_ptr, routing_weights_ptr, ids_ptr, out_ptr, outs, top_k, results_stride, out_stride, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(top_k):
        slot = token * top_k + choice
        if tl.load(ids_ptr + slot) >= 0:
            result = tl.load(results_ptr + slot * results_stride + n, mask=n < outs, other=0.0)
            total += result.to(tl.float32) * tl.load(routing_weights_ptr + slot)
    tl.store(out_ptr + token * out_stride + n, total.to(out_ptr.dtype.element_ty), mask=n < outs)


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int, block: int) -> ExpertRouting:
    """As `reference_experts.sort_by_expert`, for contiguous expert_ids; `block` is from `routing_block_size`."""
    if expert_ids.dtype != torch.int32 or not expert_ids.is_contiguous():
        raise ValueError("expert ids must be int32 and contiguous")
    num_slots = expert_ids.numel()
    blocks = max_num_blocks(num_slots, num_experts, block)
    slots = torch.empty(blocks * block, dtype=torch.int32, device=expert_ids.device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=expert_ids.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    _count_slots[(num_experts,)](expert_ids, counts, num_slots, SCAN=SCAN, num_warps=4)
    _place_slots[(num_experts + 1,)](
        expert_ids, counts, slots, block_experts, num_slots, blocks, num_experts,
        BLOCK=block, EXPERTS=triton.next_power_of_2(num_experts), SCAN=SCAN, num_warps=4,
    )  # fmt: skip
    return ExpertRouting(slots, block_experts, block, num_slots)


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, routing: ExpertRouting, slots_per_row: int) -> torch.Tensor:
    """As `reference_experts.grouped_matmul`, for bfloat16 or float16, weights contiguous, x with K contiguous."""
    _, outs, channels = weights.shape
    if x.dim() != 2 or x.shape != (routing.num_slots // slots_per_row, channels) or x.stride(1) != 1:
        raise ValueError(f"expected x [{routing.num_slots // slots_per_row}, {channels}], not {tuple(x.shape)}")
    if x.dtype != weights.dtype or x.dtype not in (torch.bfloat16, torch.float16) or not weights.is_contiguous():
        raise ValueError(f"grouped products take contiguous bfloat16 or float16, not {x.dtype} and {weights.dtype}")
    out = torch.empty((routing.num_slots, outs), dtype=x.dtype, device=x.device)
    if not routing.num_slots:
        return out
    config = grouped_matmul_config(routing.block)
    _grouped_matmul[(len(routing.block_experts), triton.cdiv(outs, config.block_n))](
        x, weights, out, routing.slots, routing.block_experts, routing.num_slots, outs, channels, slots_per_row,
        x.stride(0), out.stride(0), BM=routing.block, BN=config.block_n, BK=config.block_k,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def combine_experts(results: torch.Tensor, routing_weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """As `reference_experts.combine_experts`; routing_weights and expert_ids must be contiguous."""
    tokens, top_k = routing_weights.shape
    if results.shape[0] != tokens * top_k or expert_ids.shape != routing_weights.shape or results.stride(1) != 1:
        raise ValueError(f"results {tuple(results.shape)} do not fit routing weights {tuple(routing_weights.shape)}")
    if not (routing_weights.is_contiguous() and expert_ids.is_contiguous()):
        raise ValueError("routing weights and expert ids must be contiguous")
    outs = results.shape[1]
    out = torch.empty((tokens, outs), dtype=results.dtype, device=results.device)
    if tokens:
        _combine[(tokens, triton.cdiv(outs, 1024))](
            results,
            routing_weights,
            expert_ids,
            out,
            outs,
            top_k,
            results.stride(0),
            out.stride(0),
            BLOCK=1024,
            num_warps=4,
        )
    return out
