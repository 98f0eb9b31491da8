"""Reference matrix products that torch does not have: weight-only quantized, and grouped by expert.

Products are summed in float32 and rounded once to the input's dtype. Quantized weights are rounded to x's dtype before
the product, so the result is that of the dequantized model in that dtype.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from plait.kernels.gguf_weights import GGUFWeight, dequantize_gguf
from plait.kernels.operators import DenseLinearOp, ExpertRouting, LinearOp, max_num_blocks
from plait.kernels.quantized_weights import (
    Int4Weight,
    Int8Weight,
    LinearWeight,
    SimpleWeight,
    StackedWeight,
    dequantize,
    dequantize_int4,
    dequantize_int8,
    num_outputs,
    select_outputs,
    unscaled_values,
)


def int4_matmul(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]; returns [M, N] in x's dtype."""
    return _finish(x.float() @ dequantize_int4(weight).to(x.dtype).float().T, bias, x.dtype, out)


def int8_matmul(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `int4_matmul`, also for float8; with one scale per output channel, the scale multiplies the sum."""
    if weight.is_grouped:
        return _finish(x.float() @ dequantize_int8(weight).to(x.dtype).float().T, bias, x.dtype, out)
    return _finish((x.float() @ unscaled_values(weight).T) * weight.scales, bias, x.dtype, out)


def gguf_matmul(
    x: torch.Tensor, weight: GGUFWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `int4_matmul`."""
    return _finish(x.float() @ dequantize_gguf(weight).to(x.dtype).float().T, bias, x.dtype, out)


def _finish(
    product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    result = (product if bias is None else product + bias.float()).to(dtype)
    return result if out is None else out.copy_(result)


def make_linear(dense: DenseLinearOp = functional.linear) -> LinearOp:
    """Returns a linear layer for weights in any format: `dense` for tensors, else the products above."""

    def product(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, StackedWeight):
            sizes = [num_outputs(part) for part in weight.parts]
            biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
            return torch.cat([product(x, part, each) for part, each in zip(weight.parts, biases, strict=True)], dim=1)
        if isinstance(weight, torch.Tensor):
            return dense(x, weight, bias)
        if isinstance(weight, GGUFWeight):
            return gguf_matmul(x, weight, bias)
        return int4_matmul(x, weight, bias) if isinstance(weight, Int4Weight) else int8_matmul(x, weight, bias)

    return product


def dequantize_rows(weight: SimpleWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the output channels `rows` [n] of a weight [N, K], dequantized to `dtype`: [n, K].

    A weight that is a tensor keeps its dtype.
    """
    selected = select_outputs(weight, rows)
    return selected if isinstance(selected, torch.Tensor) else dequantize(selected).to(dtype)


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
