"""The torch runner of one rank: its part of the weights and of the KV cache, and what rank 0 sends to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from plait.runtime.batch.batch import Batch
from plait.runtime.config import EngineConfig
from plait.runtime.executor.batch_arrays import batch_arrays
from plait.runtime.executor.runner import AllowedIds, StartupProgress
from plait.runtime.executor.distributed.process_group import ProcessGroup
from plait.runtime.executor.distributed.rank_messages import Forward, Head, forward_arrays, forward_message
from plait.runtime.executor.torch_device import device_kv_cache_budget
from plait.runtime.executor.torch_inputs import ForwardInputs, upload_arrays
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.rank_checkpoint import RankCheckpoint


class OtherRanks(Protocol):
    """What a rank needs of the others beside the collective operations; rank 0 sends, the others do not."""

    def agree_on_pages(self, num_pages: int) -> int:
        """The smallest of all ranks' numbers."""

    def send(self, message: Forward | Head) -> None:
        """Lets the others begin the same operation."""

    def fail(self, error: Exception) -> None:
        """Ends the work of all ranks after an error within a step, in which the others may wait for this rank."""


class RankRunner(TorchRunner):
    """The runner of one rank. Rank 0's is the `Runner` of the scheduler; the others `follow` it."""

    has_pool_trial = False  # the launcher, whose graphs it is for, does not run here

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        group: ProcessGroup,
        others: OtherRanks,
        progress: StartupProgress = lambda fraction, doing: None,
    ) -> None:
        self.communicator = self.group = group
        self._others = others
        group.ordered = config.deterministic
        super().__init__(config, model_path, progress)

    def open_weights(self, model_path: Path) -> Checkpoint:
        return RankCheckpoint(open_checkpoint(model_path), self.group.rank)

    def kv_cache_budget(self) -> int:
        budget = device_kv_cache_budget(self.device)
        return budget if self.device.type == "cuda" else budget // self.group.rank.size  # they share the host's memory

    def agree_on_pages(self, num_pages: int) -> int:
        return self._others.agree_on_pages(num_pages)

    def _warm_up_counts(self) -> tuple[int, ...]:
        return super()._warm_up_counts() if self.group.rank.index == 0 else ()

    # -- rank 0 -----------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> torch.Tensor:
        try:
            return super().forward(batch)
        except Exception as error:
            self._others.fail(error)
            raise

    def prepare_inputs(self, batch: Batch) -> ForwardInputs:
        arrays, shared = batch_arrays(batch), self.shared_prefixes(batch)
        self._others.send(forward_message(arrays, shared))
        return upload_arrays(arrays, self.device, shared)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, allowed_ids: AllowedIds) -> torch.Tensor:
        """As in `Runner`. All ranks compute all logits, in one exchange."""
        if not len(hidden):
            return torch.empty((0, self.config.vocab_size), device=self.device)
        logits = self._compute_head(hidden, argmax=False)
        for row, ids in allowed_ids.items():
            columns = torch.from_numpy(ids).to(self.device)
            allowed = logits[row, columns]
            logits[row] = float("-inf")
            logits[row, columns] = allowed
        return logits

    @torch.inference_mode()
    def argmax_tokens(self, hidden: torch.Tensor) -> tuple[list[float], list[int]]:
        """As in `Runner`. The ranks exchange the largest logits of their tokens only."""
        if not len(hidden):
            return [], []
        best = self._compute_head(hidden, argmax=True)
        return best[:, 0].tolist(), best[:, 1].long().tolist()

    def _compute_head(self, hidden: torch.Tensor, argmax: bool) -> torch.Tensor:
        try:
            self._others.send(Head(len(hidden), argmax))
            return self.run_head(hidden.contiguous(), argmax)
        except Exception as error:
            self._others.fail(error)
            raise

    # -- every rank -------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_head(self, hidden: torch.Tensor, argmax: bool) -> torch.Tensor:
        """Logits [n, V] float32, or [n, 2] float64: the largest one and the first token that has it."""
        hidden = self.group.broadcast(hidden)
        if not argmax:
            return self.model.logits(hidden)
        largest, tokens = self.model.rank_logits(hidden).float().max(dim=-1)  # NaN if any is
        mine = torch.stack([largest.double(), (tokens + self.model.vocabulary[0]).double()], dim=-1)
        by_rank = self.group.gather_columns(mine).view(len(hidden), -1, 2)  # [n, ranks, 2]
        first = by_rank[:, :, 0].max(dim=1).indices  # the first rank of those with the same logit
        return by_rank[torch.arange(len(hidden), device=hidden.device), first]

    @torch.inference_mode()
    def follow(self, message: Forward | Head) -> None:
        """Does what rank 0 does."""
        if isinstance(message, Forward):
            arrays, shared = forward_arrays(message)
            self.run_forward(upload_arrays(arrays, self.device, shared))
        else:
            shape = (message.num_rows, self.config.hidden_size)
            self.run_head(torch.empty(shape, dtype=self.dtype, device=self.device), message.argmax)
