"""What a decoder needs of the other ranks that compute the same model; `SINGLE` is a decoder without others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from plait.runtime.models.weight_split import Rank

if TYPE_CHECKING:
    import torch


class Communicator(Protocol):
    """Collective operations: every rank calls the same ones in the same order, and gets the same bits.

    None of them reads a value on the host, so NCCL's can be captured into a CUDA graph.
    """

    rank: Rank

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors; may be written into `x`."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' [n, k] side by side, in the order of the ranks: [n, size * k]."""


class _Single:
    rank = Rank(0, 1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x


SINGLE: Communicator = _Single()
