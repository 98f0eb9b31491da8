"""The updates of adapters as `AddLowRankOp` adds them, by torch on the host, from the table that the kernels read."""

from __future__ import annotations

import ctypes
import math

import reference_experts
import torch

from plait.kernels.low_rank_table import PIECE
from plait.kernels.operators import ExpertRouting


def group_rows(slots: torch.Tensor, num_slots: int) -> ExpertRouting:
    """Sorts rows by the slot of their adapter, in blocks of 4."""
    return reference_experts.sort_by_expert(slots, num_slots, 4)


def at_address(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at an address in this process."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def add_low_rank(
    out: torch.Tensor, x: torch.Tensor, table: torch.Tensor, product: int, groups: ExpertRouting, num_terms: int
) -> None:
    """Implements `AddLowRankOp`, one block of rows after the other. Terms are rounded to the dtype of `out`."""
    for block, slot in enumerate(groups.block_experts.tolist()):
        rows = groups.slots[block * groups.block : (block + 1) * groups.block].long()
        rows = rows[rows < groups.num_slots] if slot >= 0 else rows[:0]
        if not len(rows):
            continue
        ranks, num_pieces, down, *columns = table[slot, product].tolist()
        assert ranks <= num_terms
        if num_pieces and x.dim() == 1:
            size = int(x[rows].max()) + 1
            terms = at_address(down, (size, ranks), out.dtype)[x[rows].long()]
        elif num_pieces:
            terms = (x[rows].float() @ at_address(down, (ranks, x.shape[1]), out.dtype).float().T).to(out.dtype)
        for piece in range(num_pieces):
            begin, end, first, rank, up, bias = columns[piece * PIECE : (piece + 1) * PIECE]
            delta = terms[:, first : first + rank].float() @ at_address(up, (end - begin, rank), out.dtype).float().T
            if bias:
                delta += at_address(bias, (end - begin,), out.dtype).float()
            out[rows, begin:end] = (out[rows, begin:end].float() + delta).to(out.dtype)
