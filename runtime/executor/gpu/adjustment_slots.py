"""Penalty counts and bias of requests on the device, in slots that a captured sampler reads.

A request keeps its slot while it runs, and a step uploads only what changed: for a new request its bias and the tokens
of its prompt, for a running one the tokens appended since its last step. A step is sampled after the step before was
committed, so the host knows all tokens that count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plait.kernels.sampling_inputs import Penalties, RowBias
from plait.runtime.arrays import IntArray
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.executor.gpu.stream import Stream
from plait.runtime.executor.torch_device import upload

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
