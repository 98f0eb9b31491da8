"""Sampling on the device: parameters, masks, penalties and sampled tokens in buffers at fixed addresses."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plait.kernels.operators import FusedOperators
from plait.kernels.sampling_inputs import (
    FLOAT_PARAMS,
    PENALTY_PARAMS,
    LogitAdjustments,
    Penalties,
    RowBias,
    RowMasks,
    SamplingInputs,
)
from plait.runtime.arrays import IntArray
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.executor.gpu.double_buffer import DoubleBuffer, copy_async, pinned_zeros
from plait.runtime.executor.gpu.step_logprobs import TOP_COUNTS, LogprobBuffers, LogprobPlan
from plait.runtime.executor.gpu.stream import DeviceWork, Event, Stream
from plait.runtime.executor.torch_device import upload
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.sampling_table import SAMPLER_STAGES, fields_of_stages, is_any_set

SEED_RANGE = 1 << 64
ON_DEVICE = frozenset(
    (*SamplingInputs._fields, *(f"{name}_penalty" for name in PENALTY_PARAMS), "logit_bias", "logprobs")
    + ("exact", "particles")
)
"""The sampling parameters that a step sampled on the device supports. Values of calls with `exact` or `particles` are
drawn by the scheduler, from the logits that `step_probabilities` brings to the host."""


def can_sample_on_device(gen: GenerationRequest) -> bool:
    """Whether the device's sampler supports everything that the generation asks for.

    A sampling parameter that is not in `ON_DEVICE` needs the sampler of the host.
    """
    return not is_any_set(gen.params, _host_only_params(type(gen.params)))


@functools.cache
def _host_only_params(kind: type[SamplingParams]) -> tuple[str, ...]:
    return tuple(name for name in fields_of_stages(kind, *SAMPLER_STAGES) if name not in ON_DEVICE)


class PendingTokens:
    """Sampled tokens that are being copied to the host."""

    def __init__(self, tokens: torch.Tensor, event: Event) -> None:
        self._tokens, self._event = tokens, event

    @property
    def is_ready(self) -> bool:
        return self._event.is_complete

    def tokens(self) -> list[int]:
        """Waits for the copy and returns the token ids."""
        self._event.wait()
        token_ids: list[int] = self._tokens.tolist()
        return token_ids


class GpuSampler:
    """Samples steps of up to `max_rows` rows, one step after the other.

    Order of calls for a step: `set_mask`, `enqueue`, `fetch`, `logprobs`. All of them reuse the same buffers, so they
    must follow the `tokens()` of the step before.
    """

    def __init__(self, operators: FusedOperators, max_rows: int, vocab: int, stream: Stream) -> None:
        self.max_rows, self.stream, self._operators, device = max_rows, stream, operators, stream.device
        floats = (*FLOAT_PARAMS, *PENALTY_PARAMS)
        fields = dict.fromkeys(floats, (torch.float32, max_rows))
        fields |= dict.fromkeys(("top_k", "bias_rows", "count_rows"), (torch.int32, max_rows))
        fields |= dict.fromkeys(("seed", "step"), (torch.int64, max_rows))
        self._params = DoubleBuffer(fields, stream)
        self.adjustments = AdjustmentSlots(max_rows, vocab, stream, operators.count_tokens)
        words = -(-vocab // 32)
        self._masks = DoubleBuffer({"rows": (torch.int32, max_rows)}, stream)
        self._host_words = [pinned_zeros((max_rows, words), torch.int32, device) for _ in range(2)]  # used in turn
        self._words = torch.zeros((max_rows, words), dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tokens_host = pinned_zeros((max_rows,), torch.int32, device)
        self._sample = operators.make_sampler(max_rows, vocab, device)

    def enqueue(self, generations: Sequence[GenerationRequest], sample_work: DeviceWork) -> None:
        """Uploads the rows' parameters and enqueues `sample_work`, which calls `sample`.

        If more rows have penalties or a bias than there are slots, `sample_work` runs again for each further group of
        such rows, and the tokens of its group are kept.
        """
        adjusted = [row for row, gen in enumerate(generations) if has_adjustments(gen)]
        count = self.adjustments.num_slots
        groups = [adjusted[start : start + count] for start in range(0, len(adjusted), count)] or [[]]
        kept: list[torch.Tensor] = []
        for group in groups:
            slots = self.adjustments.assign([generations[row] for row in group])
            self._set_params(generations, group, slots)
            self.stream.enqueue(sample_work)
            if len(groups) > 1:
                self.stream.enqueue(self._keep_tokens(kept, group))
        if len(groups) > 1:
            self.stream.enqueue(lambda: copy_async(kept[0], self._tokens))

    def _keep_tokens(self, kept: list[torch.Tensor], group: list[int]) -> DeviceWork:
        """Returns work that keeps the tokens of a group's rows in `kept`; at first those of all rows."""
        (rows,) = upload([np.array(group, dtype=np.int32)], self.stream.device)

        def keep() -> None:
            if not kept:
                kept.append(self._tokens.clone())
            kept[0].index_copy_(0, rows.long(), self._tokens.index_select(0, rows))

        return keep

    def _set_params(self, generations: Sequence[GenerationRequest], adjusted: list[int], slots: list[int]) -> None:
        """Starts uploading the parameters of the next step's rows, and the slots of the `adjusted` ones.

        Further rows are greedy.
        """
        self._params.begin()
        host, count = self._params.host, len(generations)
        for name in (*FLOAT_PARAMS, "top_k"):
            host[name][:count] = [getattr(gen.params, name) for gen in generations]
        host["seed"][:count] = [(gen.seed + SEED_RANGE // 2) % SEED_RANGE - SEED_RANGE // 2 for gen in generations]
        host["step"][:count] = [gen.num_sampled for gen in generations]
        host["temperature"][count:] = 0.0
        host["bias_rows"].fill(-1)
        host["count_rows"].fill(-1)
        for row, slot in zip(adjusted, slots, strict=True):
            gen = generations[row]
            if gen.params.logit_bias:
                host["bias_rows"][row] = slot
            if has_penalties(gen):
                host["count_rows"][row] = slot
                for name in PENALTY_PARAMS:
                    host[name][row] = getattr(gen.params, f"{name}_penalty")
        self._params.upload()

    def set_mask(self, mask: TokenMask | None) -> None:
        """Starts uploading the next step's masks."""
        self._masks.begin()  # waits for this buffer's last upload, which was enqueued after that of the words
        rows = self._masks.host["rows"]
        rows.fill(-1)
        if mask is not None:
            count = len(mask.rows)
            rows[mask.rows] = np.arange(count, dtype=np.int32)
            self._host_words.reverse()
            words = self._host_words[0][:count]
            words[:, : mask.words.shape[1]] = torch.from_numpy(mask.words)
            self.stream.enqueue(lambda: copy_async(words, self._words[:count]))
        self._masks.upload()

    def resolve_placeholders(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Replaces each id -1 - i in token_ids [T] int32 by the token sampled last for row i. Can be captured.

        A negative last token (no token was allowed) becomes token 0; the results of such a row are not read.
        """
        last_tokens = self._tokens.index_select(0, (-1 - token_ids).clamp_(min=0))
        return torch.where(token_ids < 0, last_tokens, token_ids).clamp_(min=0)

    def sample(self, logits: torch.Tensor) -> None:
        """Samples a token for each row of logits [n, V], which it does not change. Can be captured."""
        device, count = self._params.device, len(logits)
        inputs = SamplingInputs(*(device[name][:count] for name in SamplingInputs._fields))
        adjustments = LogitAdjustments(
            masks=RowMasks(self._words, self._masks.device["rows"][:count]),
            bias=self.adjustments.bias(device["bias_rows"][:count]),
            penalties=self.adjustments.penalties(
                device["count_rows"][:count], **{name: device[name][:count] for name in PENALTY_PARAMS}
            ),
        )
        self._sample(logits, inputs, adjustments, self._tokens[:count])

    def fetch(self, count: int) -> PendingTokens:
        """Starts copying the first `count` tokens to the host. The copy must end before the next `sample` runs."""
        host = self._tokens_host[:count]
        return PendingTokens(host, self.stream.copy_to_host(self._tokens[:count], host))

    def logprobs(self, plan: LogprobPlan, logits: Callable[[], torch.Tensor]) -> LogprobBuffers:
        """Enqueues the planned logprobs of the step that was just sampled. `logits`: called on the device."""
        buffers = LogprobBuffers(plan, self.stream.device)
        if plan.entries:
            self.stream.enqueue(lambda: buffers.compute(self._operators, logits(), self._tokens))
            buffers.copy_to_host(self.stream.copy_to_host)
        return buffers

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compiles what runs outside captured work, on logits [n, V]: counting tokens, and logprobs."""
        none = torch.full((1,), -1, dtype=torch.int32, device=logits.device)
        self._operators.count_tokens(
            torch.zeros((1, logits.shape[1]), dtype=torch.int32, device=none.device), none, none
        )
        self._operators.gather_logprobs(logits[:1], none, none)
        for count in TOP_COUNTS:
            self._operators.top_logprobs(logits[:1], count)


# -- adjustment slots -----------------------------------------------------------------------------
# Penalty counts and bias of requests on the device, in slots that a captured sampler reads.
#
# A request keeps its slot while it runs, and a step uploads only what changed: for a new request its bias and the
# tokens of its prompt, for a running one the tokens appended since its last step. A step is sampled after the step
# before was committed, so the host knows all tokens that count.

MAX_SLOT_BYTES = 128 << 20  # of all slots; one of 128,256 tokens takes 1 MB

CountTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def has_penalties(request: GenerationRequest) -> bool:
    """Whether the request's logits depend on the tokens of its prompt or output."""
    return request.needs_output_counts or request.seen_tokens is not None


def has_adjustments(request: GenerationRequest) -> bool:
    """Whether the request needs a slot."""
    return has_penalties(request) or bool(request.params.logit_bias)


@dataclass
class _Slot:
    number: int
    output_start: int = -1  # -1: not filled yet
    num_counted: int = 0  # tokens of the output that its counts hold


class AdjustmentSlots:
    """Slots for up to `num_slots` requests at a time; fewer where they would exceed `max_bytes`."""

    def __init__(
        self, num_slots: int, vocab: int, stream: Stream, count_tokens: CountTokens, max_bytes: int = MAX_SLOT_BYTES
    ) -> None:
        self._stream, self._count_tokens, self._num_words = stream, count_tokens, -(-vocab // 32)
        self.num_slots = count = max(1, min(num_slots, max_bytes // (8 * vocab + 4 * self._num_words)))

        def zeros(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((count, width), dtype=dtype, device=stream.device)

        self._counts, self._bias = zeros(vocab, torch.int32), zeros(vocab, torch.float32)
        self._prompts = zeros(self._num_words, torch.int32)
        self._slots: OrderedDict[GenerationRequest, _Slot] = OrderedDict()  # least recently used first
        self._free = list(range(count - 1, -1, -1))
        self.num_filled = self.num_counted = 0  # slots filled and tokens counted so far

    def assign(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Returns the slots of at most `num_slots` requests, and enqueues the uploads that bring them up to date."""
        for request in requests:  # so that no request of this step loses its slot to another
            if request in self._slots:
                self._slots.move_to_end(request)
        slots = [self._slot_of(request) for request in requests]
        rows: list[IntArray] = []
        tokens: list[IntArray] = []
        for request, slot in zip(requests, slots, strict=True):
            num_output = request.num_output
            if slot.output_start != request.output_start or num_output < slot.num_counted:
                self._fill(request, slot)
            if has_penalties(request) and num_output > slot.num_counted:
                first = request.output_start
                new = request.seq.tokens.view()[first + slot.num_counted : first + num_output]
                tokens.append(new)
                rows.append(np.full(len(new), slot.number, dtype=np.int32))
                slot.num_counted = num_output
        if tokens:
            at, token_ids = upload([np.concatenate(rows), np.concatenate(tokens)], self._stream.device)
            self.num_counted += len(token_ids)
            self._stream.enqueue(lambda: self._count_tokens(self._counts, at, token_ids))
        return [slot.number for slot in slots]

    def bias(self, rows: torch.Tensor) -> RowBias:
        """The bias of rows with these slots, [B] int32; -1: none."""
        return RowBias(self._bias, rows)

    def penalties(self, rows: torch.Tensor, **columns: torch.Tensor) -> Penalties:
        """The penalties of rows with these slots, [B] int32; -1: none. `columns`: their weights, see `Penalties`."""
        return Penalties(self._counts, self._prompts, rows, **columns)

    def _slot_of(self, request: GenerationRequest) -> _Slot:
        slot = self._slots.get(request)
        if slot is None:
            number = self._free.pop() if self._free else self._slots.popitem(last=False)[1].number
            slot = self._slots[request] = _Slot(number)
        return slot

    def _fill(self, request: GenerationRequest, slot: _Slot) -> None:
        """Enqueues the upload of a request's bias and prompt tokens; no token of its output is counted yet."""
        slot.output_start, slot.num_counted, number = request.output_start, 0, slot.number
        bias = request.params.logit_bias
        ids = np.array(list(bias), dtype=np.int32)
        values = np.array(list(bias.values()), dtype=np.float32).view(np.int32)
        words = np.zeros(self._num_words if request.seen_tokens is not None else 0, dtype=np.int32)
        if request.seen_tokens is not None:
            seen = request.seen_tokens.ids()
            np.bitwise_or.at(words.view(np.uint32), seen // 32, np.uint32(1) << (seen % 32).astype(np.uint32))
        parts = upload([ids, values, words], self._stream.device)
        self.num_filled += 1
        self._stream.enqueue(lambda: self._write(number, *parts))

    def _write(self, number: int, ids: torch.Tensor, values: torch.Tensor, words: torch.Tensor) -> None:
        self._counts[number].zero_()
        self._bias[number].zero_()
        if len(ids):
            self._bias[number].index_copy_(0, ids.long(), values.view(torch.float32))
        if len(words):
            self._prompts[number].copy_(words)
