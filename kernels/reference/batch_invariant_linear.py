"""Batch-invariant matrix products: the bits of a row do not depend on the number of rows.

A BLAS chooses its blocking, and so the order of its sums, by the number of rows; but for the same number of rows it
treats every row alike. So rows are multiplied in blocks of a fixed size. The last block is padded only if needed,
which is tested once per shape: most libraries sum bfloat16 blocks of up to 32 rows in one order, and padding costs a
small step an eighth of its time.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear

BLOCK_ROWS = 32
_needs_padding_cache: dict[tuple[object, ...], bool] = {}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x [T, I] times weight [O, I] transposed, plus bias [O]; a row's bits depend on that row alone."""
    if len(x) <= BLOCK_ROWS:
        return _block(x, weight, bias)
    return torch.cat([_block(block, weight, bias) for block in torch.split(x, BLOCK_ROWS)])


def _block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` of at most BLOCK_ROWS rows."""
    rows = len(x)
    if rows == BLOCK_ROWS or not _needs_padding(weight, bias):
        return torch_linear(x, weight, bias)
    padded = x.new_zeros((BLOCK_ROWS, x.shape[1]))
    padded[:rows] = x
    return torch_linear(padded, weight, bias)[:rows]


def _needs_padding(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether some block of fewer than BLOCK_ROWS rows gives other bits than a full one, for this shape and dtype.

    A library chooses by shape, dtype, instruction set and threads, never by the values. The test therefore uses values
    whose sums cancel: only the rounding errors of the additions remain, which reveal their order in every result,
    where bfloat16 would hide it in most.
    """
    key = (*weight.shape, weight.dtype, weight.device, bias is None, torch.get_num_threads())
    needs_padding = _needs_padding_cache.get(key)
    if needs_padding is None:
        generator = torch.Generator().manual_seed(0)
        x, values = (_mirrored(rows, weight.shape[1], generator).to(weight) for rows in (BLOCK_ROWS, len(weight)))
        x[:, weight.shape[1] // 2 :] *= -1
        zero_bias = None if bias is None else torch.zeros_like(bias)
        full = torch_linear(x, values, zero_bias)
        parts = (torch_linear(x[:rows], values, zero_bias) for rows in range(1, BLOCK_ROWS))
        needs_padding = not all(torch.equal(part, full[: len(part)]) for part in parts)
        _needs_padding_cache[key] = needs_padding
    return needs_padding


def _mirrored(rows: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Random values [rows, inputs] whose second half is the first in reverse order."""
    half = torch.randn(rows, inputs // 2, generator=generator)
    return torch.cat([half, half.new_ones(rows, inputs % 2), half.flip(1)], dim=1)
