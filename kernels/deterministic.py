"""Matrix products whose rows do not depend on how many rows there are.

A BLAS picks its blocking, and so the order of its sums, by the number of rows; the same row comes out with other
bits alone than among 256. Given the same number of rows every time, it treats each of them alike. So rows go
through in blocks of a fixed size, the last one padded.

Knows: one operator. Must not know: models, batches.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear

ROWS = 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, I] times weight [O, I] transposed, plus bias [O]; a row's bits depend on that row alone."""
    rows = len(x)
    if rows <= ROWS:  # decoding; each operator more costs a tenth of a small product
        whole = torch_linear(x if rows == ROWS else _filled(x), weight, bias)
        return whole if rows == ROWS else whole[:rows]
    blocks = list(torch.split(x, ROWS))
    last = len(blocks[-1])
    blocks[-1] = blocks[-1] if last == ROWS else _filled(blocks[-1])
    found = torch.cat([torch_linear(block, weight, bias) for block in blocks])
    return found if last == ROWS else found[:rows]


def _filled(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] with rows of zeros behind it, [ROWS, I]."""
    filled = x.new_zeros((ROWS, x.shape[1]))
    filled[: len(x)] = x
    return filled
