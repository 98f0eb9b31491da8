"""The logprobs of a step, computed on the device: of sampled tokens, of prompts, and the scores of a `select`.

What a step has to return is known when it is launched, but for the tokens that it samples: those are read on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from plait.kernels.operators import FusedOperators
from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.batch.request import GenerationRequest, ScoringRequest
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.executor.gpu.double_buffer import pinned_zeros
from plait.runtime.executor.gpu.stream import Event
from plait.runtime.executor.torch_device import upload
from plait.runtime.sampling.logit_ops import TopLogprobs
from plait.runtime.sampling.sampler import SamplerOutput

TOP_COUNTS = (20, 128)  # how many of the largest a kernel finds; one compilation for each
INT32 = torch.int32


@dataclass
class _Entry:
    """One logprob: of `token` (-1 - slot: the one that the step samples) in row `row` of the logits."""

    request: GenerationRequest | ScoringRequest
    row: int
    token: int
    num_top: int
    position: int = -1  # of a scored token
    is_prompt: bool = False


@dataclass
class LogprobPlan:
    """What a step returns besides tokens."""

    entries: list[_Entry] = field(default_factory=list)
    scored: list[ScoringRequest] = field(default_factory=list)  # also those without a token to score in this step
    prompts: list[GenerationRequest] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[ScheduledRequest]) -> LogprobPlan:
        """Plans a step of these rows."""
        plan, first_row, slot = cls(), 0, 0
        for scheduled in rows:
            request, count = scheduled.request, scheduled.num_logits
            if isinstance(request, ScoringRequest) and count:
                plan._add_scores(scheduled, request, first_row)
            elif isinstance(request, GenerationRequest):
                if count > scheduled.is_sampled and not request.needs_probabilities:
                    plan._add_prompt(scheduled, request, first_row)
                if scheduled.is_sampled and request.params.logprobs:
                    num_top = request.params.top_logprobs
                    plan.entries.append(_Entry(request, first_row + count - 1, -1 - slot, num_top))
                slot += scheduled.is_sampled
            first_row += count
        return plan

    def _add_scores(self, scheduled: ScheduledRequest, request: ScoringRequest, first_row: int) -> None:
        first = scheduled.start + scheduled.count - scheduled.num_logits
        self.scored.append(request)
        for index in range(scheduled.num_logits):
            for token in request.targets.get(first + index, ()):
                self.entries.append(
                    _Entry(request, first_row + index, token, request.selection.top_logprobs, first + index)
                )

    def _add_prompt(self, scheduled: ScheduledRequest, request: GenerationRequest, first_row: int) -> None:
        """Each position gives the logprob of the prompt's next token; the last one of the prompt has none."""
        self.prompts.append(request)
        end, count = scheduled.start + scheduled.count, scheduled.num_logits
        tokens = request.seq.tokens.view()[end - count + 1 : end + 1].tolist()
        for index, token in enumerate(tokens):
            self.entries.append(_Entry(request, first_row + index, token, request.params.top_logprobs, is_prompt=True))

    @property
    def is_empty(self) -> bool:
        """Whether the step returns tokens only."""
        return not (self.entries or self.scored or self.prompts)


CopyToHost: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Event]
PairBuffers: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logprobs [P], values [R, K], ids [R, K]


class LogprobBuffers:
    """The results of one step in one tensor, copied to the host at once. They are this step's own memory."""

    def __init__(self, plan: LogprobPlan, device: torch.device) -> None:
        self.plan, entries = plan, plan.entries
        self.rows = sorted({entry.row for entry in entries})  # the rows of logits that are read
        place = {row: index for index, row in enumerate(self.rows)}
        self._places = [place[entry.row] for entry in entries]
        most = max((entry.num_top for entry in entries), default=0)
        self.num_top = next((count for count in TOP_COUNTS if count >= most), TOP_COUNTS[-1]) if most else 0
        size = len(entries) + 2 * len(self.rows) * self.num_top
        self._device = torch.empty(size, dtype=torch.float32, device=device)
        self._host = pinned_zeros((size,), torch.float32, device)
        token_ids = np.array([entry.token for entry in entries], dtype=np.int32)
        arrays = [np.array(self.rows, dtype=np.int32), np.array(self._places, dtype=np.int32), token_ids]
        self._row_ids, self._pair_rows, self._token_ids = upload(arrays, device)
        self.copied: Event | None = None

    def compute(self, operators: FusedOperators, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Fills the device's tensor from logits [n, V] and the step's sampled tokens. Runs on the device."""
        needed = logits if len(self.rows) == len(logits) else logits.index_select(0, self._row_ids)
        slots = (-1 - self._token_ids).clamp_(min=0)
        tokens = torch.where(self._token_ids < 0, sampled.index_select(0, slots), self._token_ids)
        logprobs, values, ids = self._parts(self._device)
        logprobs.copy_(operators.gather_logprobs(needed, self._pair_rows, tokens))
        if self.num_top:
            top_values, top_ids = operators.top_logprobs(needed, self.num_top)
            values.copy_(top_values)
            ids.copy_(top_ids)

    def copy_to_host(self, copy: CopyToHost) -> None:
        """Starts the copy to the host, behind `compute`."""
        self.copied = copy(self._device, self._host)

    @property
    def is_ready(self) -> bool:
        """Whether `add_to` does not wait."""
        return self.copied is None or self.copied.is_complete

    def add_to(self, output: SamplerOutput) -> None:
        """Waits for the copy, and adds the results to a step's output."""
        if self.copied is not None:
            self.copied.wait()
        output.scores |= {request: {} for request in self.plan.scored}
        output.top_logprobs |= {request: {} for request in self.plan.scored if request.selection.top_logprobs}
        output.prompt_logprobs |= {request: [] for request in self.plan.prompts}
        logprobs, values, ids = self._parts(self._host)
        all_values, all_ids = values.tolist(), ids.tolist()
        for entry, place, logprob in zip(self.plan.entries, self._places, logprobs.tolist(), strict=True):
            top: TopLogprobs = []
            if entry.num_top:
                pairs = zip(all_ids[place][: entry.num_top], all_values[place], strict=False)
                top = [(token, value) for token, value in pairs if token >= 0]
            _add_entry(output, entry, logprob, top)

    def _parts(self, memory: torch.Tensor) -> PairBuffers:
        count, shape = len(self.plan.entries), (len(self.rows), self.num_top)
        values, ids = memory[count:].view(2, *shape)
        return memory[:count], values, ids.view(INT32)


def _add_entry(output: SamplerOutput, entry: _Entry, logprob: float, top: TopLogprobs) -> None:
    request = entry.request
    if isinstance(request, ScoringRequest):
        output.scores[request][entry.position, entry.token] = logprob
        if entry.num_top:
            output.top_logprobs[request][entry.position] = top
    elif entry.is_prompt:
        output.prompt_logprobs[request].append(TokenLogprob(entry.token, logprob, top))
    elif output.tokens[request] >= 0:
        output.logprobs[request] = TokenLogprob(output.tokens[request], logprob, top)
