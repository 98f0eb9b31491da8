"""Matrix products whose rows do not depend on how many rows there are.

A BLAS picks its blocking, and so the order of its sums, by the number of rows; the same row comes out with other
bits alone than among 256. Given the same number of rows every time, it treats each of them alike. So rows go
through in blocks of a fixed size. The last block is filled up where it has to be, which is tried once for each shape:
most libraries take bfloat16 blocks of any size up to 32 in one order, and filling costs a small step an eighth.

Knows: one operator. Must not know: models, batches.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear

BLOCK_ROWS = 32
_needs_padding_cache: dict[tuple[object, ...], bool] = {}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, I] times weight [O, I] transposed, plus bias [O]; a row's bits depend on that row alone."""
    if len(x) <= BLOCK_ROWS:
        return _block(x, weight, bias)
    return torch.cat([_block(block, weight, bias) for block in torch.split(x, BLOCK_ROWS)])


def _block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` of at most ROWS rows."""
    rows = len(x)
    if rows == BLOCK_ROWS or not _needs_padding(weight, bias):
        return torch_linear(x, weight, bias)
    padded = x.new_zeros((BLOCK_ROWS, x.shape[1]))
    padded[:rows] = x
    return torch_linear(padded, weight, bias)[:rows]


def _needs_padding(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether some number of rows below ROWS gives other bits than ROWS do, for products of this shape and type.

    A library chooses by these, the instructions and the threads, never by the numbers. So sums of numbers tell that
    cancel out: what is left is the rounding of each addition, which shows the order in every result, where bfloat16
    would hide it in most.
    """
    key = (*weight.shape, weight.dtype, weight.device, bias is None, torch.get_num_threads())
    found = _needs_padding_cache.get(key)
    if found is None:
        generator = torch.Generator().manual_seed(0)
        x, numbers = (_mirrored(rows, weight.shape[1], generator).to(weight) for rows in (BLOCK_ROWS, len(weight)))
        x[:, weight.shape[1] // 2 :] *= -1
        none = None if bias is None else torch.zeros_like(bias)
        whole = torch_linear(x, numbers, none)
        parts = (torch_linear(x[:rows], numbers, none) for rows in range(1, BLOCK_ROWS))
        found = _needs_padding_cache[key] = not all(torch.equal(part, whole[: len(part)]) for part in parts)
    return found


def _mirrored(rows: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Random numbers [rows, inputs], the second half those of the first from its end on."""
    half = torch.randn(rows, inputs // 2, generator=generator)
    return torch.cat([half, half.new_ones(rows, inputs % 2), half.flip(1)], dim=1)
