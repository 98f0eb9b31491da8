"""The torch runner of one rank: its part of the weights and of the KV cache, and what rank 0 sends to the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from plait.runtime.arrays import IntArray
from plait.runtime.batch.batch import Batch
from plait.runtime.config import EngineConfig
from plait.runtime.executor.batch_arrays import BatchArrays, batch_arrays
from plait.runtime.executor.distributed.micro_batches import StepCosts, micro_batch_ends, split_step
from plait.runtime.executor.distributed.process_group import ProcessGroup
from plait.runtime.executor.distributed.rank_messages import Forward, Head, forward_arrays, forward_message
from plait.runtime.executor.runner import AllowedIds, StartupProgress
from plait.runtime.executor.torch_device import device_kv_cache_budget
from plait.runtime.executor.torch_inputs import upload_arrays
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.pipeline_stages import Stage, layer_weights, split_layers
from plait.runtime.weights.rank_checkpoint import open_rank_checkpoint

# The new tokens of a step whose arithmetic takes as long as reading the weights, see `StepCosts`. CPU: with bfloat16,
# 1 token took 19 ms and 16 took 27 ms on two cores. GPU: 990 TFLOP/s and 3.35 TB/s of an H100, rounded; not measured.
WEIGHTS_COST = {"cpu": 32.0, "cuda": 256.0}


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

    has_launcher = False

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
        return open_rank_checkpoint(model_path, self.group.rank)

    def stage(self, config: ModelConfig) -> Stage:
        return split_layers(config, self.group.stage.size)[self.group.stage.index]

    def kv_cache_budget(self) -> int:
        budget = device_kv_cache_budget(self.device)
        return budget if self.device.type == "cuda" else budget // self.group.world.size  # they share the host's memory

    def agree_on_pages(self, num_pages: int) -> int:
        return self._others.agree_on_pages(num_pages)

    def _warm_up_counts(self) -> tuple[int, ...]:
        return super()._warm_up_counts() if self.group.world.index == 0 else ()

    # -- rank 0 -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        try:
            arrays, shared = batch_arrays(batch), self.shared_prefixes(batch)
            ends = self.micro_batch_ends(arrays)
            self._others.send(forward_message(arrays, shared, ends))
            return self._run_step(arrays, shared, ends)
        except Exception as error:
            self._others.fail(error)
            raise

    def micro_batch_ends(self, arrays: BatchArrays) -> list[int]:
        """How the step is divided among stages that work at the same time; see `micro_batches.micro_batch_ends`."""
        return micro_batch_ends(arrays, self.group.stage.size, self._step_costs)

    @cached_property
    def _step_costs(self) -> StepCosts:
        weights = WEIGHTS_COST["cuda" if self.device.type == "cuda" else "cpu"]
        counts = layer_weights(self.config)[self.model.stage.first : self.model.stage.end]
        num_read = sum(counts) - self.config.vocab_size * self.config.hidden_size  # of the embedding, few rows are read
        return StepCosts(weights, weights * self.page_bytes / (num_read * self.dtype.itemsize))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, allowed_ids: AllowedIds) -> torch.Tensor:
        """As in `Runner`. All ranks of the last stage compute all logits, in one exchange."""
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
            return self._run_head(hidden.contiguous(), argmax)
        except Exception as error:
            self._others.fail(error)
            raise

    # -- every rank -------------------------------------------------------------------------------

    @torch.inference_mode()
    def follow(self, message: Forward | Head) -> None:
        """Does what rank 0 does."""
        if isinstance(message, Forward):
            self._run_step(*forward_arrays(message), message.ends)
        elif self.model.stage.is_last:
            self._run_head(self._empty(message.num_rows), message.argmax)

    def _run_step(self, arrays: BatchArrays, shared: Sequence[IntArray], ends: list[int]) -> torch.Tensor:
        """Hidden states at the step's outputs [n, C], in rank 0 and in the last stage; in other ranks undefined."""
        outputs = [self._run_micro_batch(*part) for part in split_step(arrays, shared, ends)]
        if not len(arrays.output_indices):
            return self._empty(0)
        if self.model.stage.is_last:
            return self.group.last_stage_to_rank0(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
        empty = self._empty(len(arrays.output_indices))
        return self.group.last_stage_to_rank0(empty) if self.group.world.index == 0 else empty

    def _run_micro_batch(self, arrays: BatchArrays, shared: Sequence[IntArray]) -> torch.Tensor:
        """The last stage's hidden states at the micro-batch's outputs; other stages send all hidden states on."""
        inputs, stage, received = upload_arrays(arrays, self.device, shared), self.model.stage, None
        if not stage.is_first:
            received = self.group.receive_from_previous_stage(self._empty(len(arrays.token_ids)))
        hidden = self.run_layers(inputs, received)
        if not stage.is_last:
            self.group.send_to_next_stage(hidden)
        elif len(inputs.output_indices) < len(hidden):
            hidden = hidden[inputs.output_indices]
        return hidden

    def _run_head(self, hidden: torch.Tensor, argmax: bool) -> torch.Tensor:
        """Logits [n, V] float32, or [n, 2] float64: the largest one and the first token that has it."""
        hidden = self.group.rank0_to_last_stage(hidden)
        if self.model.stage.is_last:
            result = self._largest_logits(hidden) if argmax else self.model.logits(hidden)
        elif argmax:
            result = torch.empty((len(hidden), 2), dtype=torch.float64, device=self.device)
        else:
            result = torch.empty((len(hidden), self.config.vocab_size), dtype=torch.float32, device=self.device)
        return self.group.last_stage_to_rank0(result)

    def _largest_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        largest, tokens = self.model.rank_logits(hidden).float().max(dim=-1)  # NaN if any is
        mine = torch.stack([largest.double(), (tokens + self.model.vocabulary[0]).double()], dim=-1)
        by_rank = self.group.gather_columns(mine).view(len(hidden), -1, 2)  # [n, ranks, 2]
        first = by_rank[:, :, 0].max(dim=1).indices  # the first rank of those with the same logit
        return by_rank[torch.arange(len(hidden), device=hidden.device), first]

    def _empty(self, num_tokens: int) -> torch.Tensor:
        """Hidden states to be received."""
        return torch.empty((num_tokens, self.config.hidden_size), dtype=self.dtype, device=self.device)
