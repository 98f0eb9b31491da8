"""Matrix products in plain torch that torch itself does not have: weight-only quantized, and grouped by expert.

Products are summed in float32 and rounded once to the input's dtype. A quantized weight takes part as the dtype of
x would hold it, so the result is that of the dequantized model in that dtype.
Knows: torch. Must not know: models.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from plait.kernels.operators import DenseLinearOp, ExpertRouting, LinearOp, max_num_blocks
from plait.kernels.quantized_weights import (
    Int4Weight,
    Int8Weight,
    LinearWeight,
    dequantize_int4,
    dequantize_int8,
    select_outputs,
)


def int4_matmul(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]; returns [M, N] in x's dtype."""
    return _finish(x.float() @ dequantize_int4(weight).to(x.dtype).float().T, bias, x.dtype, out)


def int8_matmul(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `int4_matmul`; where an output channel has one scale, it multiplies the whole sum."""
    if weight.is_grouped:
        return _finish(x.float() @ dequantize_int8(weight).to(x.dtype).float().T, bias, x.dtype, out)
    return _finish((x.float() @ weight.values.float().T) * weight.scales, bias, x.dtype, out)


def _finish(
    product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    result = (product if bias is None else product + bias.float()).to(dtype)
    return result if out is None else out.copy_(result)


def make_linear(dense: DenseLinearOp = functional.linear) -> LinearOp:
    """A linear layer over a weight in any form: `dense` where it is a tensor, else the above."""

    def product(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return dense(x, weight, bias)
        return int4_matmul(x, weight, bias) if isinstance(weight, Int4Weight) else int8_matmul(x, weight, bias)

    return product


def dequantize_rows(weight: LinearWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The outputs `rows` [n] of a weight [N, K] as plain numbers [n, K], in `dtype` unless it holds such already."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    taken = select_outputs(weight, rows)
    if isinstance(taken, Int4Weight):
        taken = dequantize_int4(taken)
    return (dequantize_int8(taken) if isinstance(taken, Int8Weight) else taken).to(dtype)


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int, block: int) -> ExpertRouting:
    """Sorts the slots of expert_ids [T, top_k] int32 by expert; negative ids go nowhere."""
    flat = expert_ids.flatten().tolist()
    slots: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        mine = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        slots += mine + [len(flat)] * (-len(mine) % block)
        experts += [expert] * -(-len(mine) // block)
    unused = max_num_blocks(len(flat), num_experts, block) - len(experts)
    slots += [len(flat)] * (unused * block)
    experts += [-1] * unused
    made = [torch.tensor(values, dtype=torch.int32, device=expert_ids.device) for values in (slots, experts)]
    return ExpertRouting(made[0], made[1], block, len(flat))


def grouped_matmul(
    x: torch.Tensor, weights: torch.Tensor, routing: ExpertRouting, slots_per_row: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out[slot] = x[slot // slots_per_row] times weights[expert of slot] transposed, [num_slots, N] in x's dtype.

    x [num_slots / slots_per_row, K], weights [E, N, K]. `slots_per_row`: top_k where x has one row per token, 1 where it has
    one per slot. Rows of slots that go to no expert are left as they were.
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
    """The sum over each token's experts of share times result: results [T * top_k, N], shares [T, top_k] float32.

    Choices whose expert id [T, top_k] is negative are left out. Returns [T, N] in the results' dtype.
    """
    tokens, top_k = routing_weights.shape
    there = (expert_ids >= 0)[..., None]
    wide = torch.where(there, results.view(tokens, top_k, -1).float() * routing_weights[..., None], 0.0)
    total = wide.sum(1).to(results.dtype)
    return total if out is None else out.copy_(total)
