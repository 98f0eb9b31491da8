"""What runners on torch share: the device, and the conversions of hidden states that `Runner` asks for."""

from __future__ import annotations

from typing import Protocol

import torch

from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.executor.runner import SUM_QUANTUM, AllowedIds, fill_logits
from plait.runtime.executor.torch_device import use_device
from plait.runtime.sampling.numpy_ops import row_argmax


class OutputHead(Protocol):
    """A model that computes logits."""

    def logits(self, hidden: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [n, V] float32 of hidden [n, C]; with token ids `columns` [k], only those columns: [n, k]."""


class TorchOutputs:
    """Implements the methods of `Runner` that take hidden states, for a model on a torch device."""

    def __init__(self, device: torch.device, head: OutputHead, vocab_size: int) -> None:
        self.device, self._head, self._vocab_size = device, head, vocab_size

    def use_device(self) -> None:
        """As in `Runner`."""
        use_device(self.device)

    @torch.inference_mode()
    def hidden_states_at(self, hidden: torch.Tensor, indices: list[int]) -> Float32Array:
        """As in `Runner`."""
        states: Float32Array = hidden[indices].float().cpu().numpy()
        return states

    @torch.inference_mode()
    def sum_hidden_states(self, hidden: torch.Tensor) -> Float64Array:
        """As in `Runner`."""
        hidden = hidden if hidden.is_cuda else hidden.cpu()  # some devices, as MPS, have no float64
        quanta: Float64Array = (hidden.float() / SUM_QUANTUM).round_().sum(dim=0, dtype=torch.float64).cpu().numpy()
        return quanta * SUM_QUANTUM

    def argmax_tokens(self, hidden: torch.Tensor) -> tuple[list[float], list[int]]:
        """As in `Runner`."""
        logits = self.logits(hidden, {})
        if self.device.type == "cpu":
            return row_argmax(logits.numpy())
        max_logits, token_ids = logits.max(dim=-1)
        return max_logits.tolist(), token_ids.tolist()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, allowed_ids: AllowedIds) -> torch.Tensor:
        """As in `Runner`."""
        if not len(hidden):
            return torch.empty((0, self._vocab_size), device=self.device)
        if not allowed_ids:
            return self.logits_of(hidden, None)
        columns = {row: torch.from_numpy(ids).to(self.device) for row, ids in allowed_ids.items()}
        out = torch.full((len(hidden), self._vocab_size), float("-inf"), device=self.device)
        fill_logits(out, columns, lambda rows, *ids: self.logits_of(hidden, rows, *ids))
        return out

    def logits_of(
        self, hidden: torch.Tensor, rows: list[int] | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`OutputHead.logits` of some rows of hidden [n, C]; None: of all."""
        return self._head.logits(hidden if rows is None else hidden[rows], columns)
