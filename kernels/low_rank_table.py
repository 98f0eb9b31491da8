"""Low-rank updates of a model's products (LoRA, arXiv:2106.09685) on a device, and the table of their addresses.

An entry of the table [slots, products, COLUMNS] int64 describes what the adapter in a slot adds to a product:

    ranks of `down`, number of pieces, address of `down`; then for each piece
    its first output, the one behind its last, its first rank, its ranks, the addresses of `up` and bias (0: no bias)

An entry of zeros is of an adapter that leaves the product as it is. The table stays where it is, so a captured step
reads what it holds at each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

RANK_STEP = 16  # ranks are padded to a multiple of it, the depth of a tensor core's product
MAX_PIECES = 3  # q, k and v
HEADER, PIECE = 3, 6  # columns
COLUMNS = HEADER + MAX_PIECES * PIECE


class LowRankPiece(NamedTuple):
    """Adds terms[:, first : first + r] @ up.T + bias to N outputs of a product, from output `begin` on."""

    begin: int
    first: int
    up: torch.Tensor  # [N, r]
    bias: torch.Tensor | None  # [N]


class LowRankProduct(NamedTuple):
    """The update of a product of x [T, K], whose terms are x @ down.T; of the embedding, they are down[token ids]."""

    down: torch.Tensor  # [R, K]; of the embedding [V, R]
    pieces: Sequence[LowRankPiece]

    @property
    def num_terms(self) -> int:
        """R."""
        return sum(piece.up.shape[1] for piece in self.pieces)

    def entry(self) -> list[int]:
        """Its entry of the table."""
        columns = [self.num_terms, len(self.pieces), self.down.data_ptr()]
        for begin, first, up, bias in self.pieces:
            address = 0 if bias is None else bias.data_ptr()
            columns += [begin, begin + len(up), first, up.shape[1], up.data_ptr(), address]
        return columns + [0] * (COLUMNS - len(columns))
