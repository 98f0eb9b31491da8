"""The torch runner of one rank: its part of the weights and of the KV cache, and what rank 0 sends to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from plait.kernels.layout import shared_prefix_arrays
from plait.runtime.arrays import IntArray
from plait.runtime.batch.batch import Batch
from plait.runtime.config import EngineConfig
from plait.runtime.executor.batch_arrays import BatchArrays, batch_arrays
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


# -- micro batches --------------------------------------------------------------------------------
# Divides a step into micro-batches, which the stages of a pipeline compute one after the other, at the same time.
#
#     stage 0   | 0 | 1 | 2 |
#     stage 1       | 0 | 1 | 2 |        3 micro-batches take 4 turns, not 6
#
# A micro-batch is a range of the step's new tokens: complete rows, and at its ends parts of prompt chunks, cut at
# multiples of `CUT_ALIGN` tokens of the text, which are page borders (a page holds one token). The order of the tokens
# stays that of the step. So a row's earlier tokens, and prefixes that another row of the step computes, are in the same
# micro-batch or an earlier one: the scheduler adds a row that reads new pages behind the row that writes them.

CUT_ALIGN = 64  # tokens; attention's larger tiles have as many


class StepCosts(NamedTuple):
    """What a stage's time for a micro-batch of n tokens that read m tokens of KV is: weights + n + m * kv.

    The unit is the arithmetic of one token. `weights`: reading the stage's weights. `kv`: reading a token's KV.
    """

    weights: float
    kv: float


def micro_batch_ends(arrays: BatchArrays, num_stages: int, costs: StepCosts) -> list[int]:
    """Where the micro-batches of a step end, as numbers of its new tokens; the last end is their number T.

    S stages need (M + S - 1) * (weights + work / M) for M micro-batches of equal work, which is least for
    M = sqrt((S - 1) * work / weights). Each of them reads all weights, so decode steps of few rows are not divided.
    """
    total = len(arrays.token_ids)
    if num_stages == 1:
        return [total]
    counts, lengths = np.diff(arrays.q_starts), np.diff(arrays.kv_starts)
    row_costs = counts + costs.kv * lengths
    row_ends = np.cumsum(row_costs)
    wanted = round(math.sqrt((num_stages - 1) * float(row_ends[-1]) / costs.weights))
    ends = {total}
    for k in range(1, min(wanted, total)):
        target = float(row_ends[-1]) * k / wanted
        row = min(int(np.searchsorted(row_ends, target)), len(counts) - 1)
        done = (target - float(row_ends[row] - row_costs[row])) / float(row_costs[row])  # of the row, 0 to 1
        ends.add(int(arrays.q_starts[row]) + _cut(int(counts[row]), int(lengths[row]), done))
    return sorted(ends - {0})


def _cut(count: int, length: int, done: float) -> int:
    """How many of a row's `count` new tokens, the last of `length`, are before a cut at about `done` of them."""
    if count < 2 * CUT_ALIGN:
        return count if done >= 0.5 else 0
    start = length - count
    position = round((start + done * count) / CUT_ALIGN) * CUT_ALIGN
    return min(max(position - start, 0), count)


def split_step(
    arrays: BatchArrays, shared: Sequence[IntArray], ends: Sequence[int]
) -> list[tuple[BatchArrays, Sequence[IntArray]]]:
    """The arrays of each micro-batch, and those of its shared prefixes; `ends` as from `micro_batch_ends`."""
    if len(ends) < 2:
        return [(arrays, shared)]
    begins = [0, *ends[:-1]]
    return [_part(arrays, shared, begin, end) for begin, end in zip(begins, ends, strict=True)]


def _part(
    arrays: BatchArrays, shared: Sequence[IntArray], begin: int, end: int
) -> tuple[BatchArrays, Sequence[IntArray]]:
    """The arrays of the new tokens [begin, end)."""
    q_starts, kv_starts = arrays.q_starts, arrays.kv_starts
    first = int(np.searchsorted(q_starts, begin, side="right")) - 1
    last = int(np.searchsorted(q_starts, end, side="left")) - 1
    kv_end = kv_starts[last + 1] - (q_starts[last + 1] - end)  # the last row may go on in the next micro-batch
    part_kv_starts = kv_starts[first : last + 2] - kv_starts[first]
    part_kv_starts[-1] = kv_end - kv_starts[first]
    outputs = arrays.output_indices
    part = BatchArrays(
        token_ids=arrays.token_ids[begin:end],
        output_indices=outputs[(outputs >= begin) & (outputs < end)] - np.int32(begin),
        q_starts=np.clip(q_starts[first : last + 2], begin, end) - np.int32(begin),
        kv_starts=part_kv_starts,
        kv_pages=arrays.kv_pages[kv_starts[first] : kv_end],
        positions=arrays.positions[begin:end],
        write_slots=arrays.write_slots[begin:end],
    )
    return part, _shared_part(q_starts, shared, begin, end, slice(first, last + 1)) if shared else ()


def _shared_part(
    q_starts: IntArray, shared: Sequence[IntArray], begin: int, end: int, part_rows: slice
) -> Sequence[IntArray]:
    """The shared prefixes of the rows that are complete in [begin, end), as `shared_prefix_arrays` returns them."""
    lengths, _, starts, tokens, _ = shared
    is_complete = (q_starts[:-1] >= begin) & (q_starts[1:] <= end)
    groups = []
    for start, stop in pairwise(starts):
        members = np.searchsorted(q_starts, tokens[start:stop], side="right") - 1
        rows = [int(row) for row in dict.fromkeys(members.tolist()) if is_complete[row]]
        if len(rows) > 1:
            groups.append(([row - part_rows.start for row in rows], int(lengths[rows[0]])))
    if not groups:
        return ()
    inside = np.clip(q_starts, begin, end)
    return shared_prefix_arrays(groups, (inside[1:] - inside[:-1])[part_rows])
