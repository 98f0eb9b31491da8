"""Matrix products whose rows do not depend on how many rows there are.

A BLAS picks its blocking, and so the order of its sums, by the number of rows; the same row comes out with other
bits alone than among 256. Given the same number of rows every time, it treats each of them alike. So rows go
through in blocks of a fixed size, the last one padded.

Knows: one operator. Must not know: models, batches.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad

ROWS = 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, I] times weight [O, I] transposed, plus bias [O]; a row's bits depend on that row alone."""
    rows = len(x)
    padded = pad(x, (0, 0, 0, -rows % ROWS))
    blocks = [torch_linear(block, weight, bias) for block in torch.split(padded, ROWS)]
    return torch.cat(blocks)[:rows] if len(blocks) > 1 else blocks[0][:rows]
