"""Reference of the Triton kernels of experts: matrix products of rows grouped by expert."""

from __future__ import annotations

import torch

from plait.kernels.operators import ExpertRouting, max_num_blocks


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int, block: int) -> ExpertRouting:
    """Sorts the slots of expert_ids [T, top_k] int32 by expert; slots with negative ids are left out."""
    flat = expert_ids.flatten().tolist()
    slots: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        expert_slots = [slot for slot, expert_id in enumerate(flat) if expert_id == expert]
        slots += expert_slots + [len(flat)] * (-len(expert_slots) % block)
        experts += [expert] * -(-len(expert_slots) // block)
    unused = max_num_blocks(len(flat), num_experts, block) - len(experts)
    slots += [len(flat)] * (unused * block)
    experts += [-1] * unused
    tensors = [torch.tensor(values, dtype=torch.int32, device=expert_ids.device) for values in (slots, experts)]
    return ExpertRouting(tensors[0], tensors[1], block, len(flat))


def grouped_matmul(
    x: torch.Tensor, weights: torch.Tensor, routing: ExpertRouting, slots_per_row: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes out[slot] = x[slot // slots_per_row] times weights[expert of slot] transposed.

    x [num_slots / slots_per_row, K], weights [E, N, K]; returns [num_slots, N] in x's dtype. `slots_per_row`: top_k if
    x has one row per token, 1 if it has one per slot. Rows of slots without an expert are not written.
    """
    if out is None:
        out = torch.empty((routing.num_slots, weights.shape[1]), dtype=x.dtype, device=x.device)
    for block, expert in enumerate(routing.block_experts.tolist()):
        slots = routing.slots[block * routing.block : (block + 1) * routing.block].long()
        slots = slots[slots < routing.num_slots] if expert >= 0 else slots[:0]
        out[slots] = (x[slots // slots_per_row].float() @ weights[expert].float().T).to(x.dtype)
    return out


def combine_experts(
    results: torch.Tensor, routing_weights: torch.Tensor, expert_ids: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums each token's results [T * top_k, N], weighted by routing_weights [T, top_k] float32.

    Choices with a negative expert id [T, top_k] are left out. Returns [T, N] in the results' dtype.
    """
    tokens, top_k = routing_weights.shape
    is_chosen = (expert_ids >= 0)[..., None]
    weighted = torch.where(is_chosen, results.view(tokens, top_k, -1).float() * routing_weights[..., None], 0.0)
    total = weighted.sum(1).to(results.dtype)
    return total if out is None else out.copy_(total)
