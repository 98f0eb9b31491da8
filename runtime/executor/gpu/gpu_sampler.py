"""Sampling on the device: parameters, masks and sampled tokens in buffers at fixed addresses."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from plait.kernels.operators import FusedOperators
from plait.kernels.sampling_inputs import FLOAT_PARAMS, LogitAdjustments, RowMasks, SamplingInputs
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.executor.gpu.double_buffer import DoubleBuffer, copy_async, pinned_zeros
from plait.runtime.executor.gpu.stream import Event, Stream
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling_params import SAMPLER_STAGES, SamplingParams, fields_of_stages, is_any_set

SEED_RANGE = 1 << 64


def can_sample_on_device(gen: GenerationRequest) -> bool:
    """Whether the device's sampler supports everything that the generation asks for.

    A sampling parameter that `SamplingInputs` does not hold needs the sampler of the host.
    """
    return not is_any_set(gen.params, _host_only_params(type(gen.params)))


@functools.cache
def _host_only_params(kind: type[SamplingParams]) -> tuple[str, ...]:
    return tuple(name for name in fields_of_stages(kind, *SAMPLER_STAGES) if name not in SamplingInputs._fields)


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

    Order of calls for a step: `set_params`, `set_mask`, `sample` (enqueued), `fetch`. All of them reuse the same
    buffers, so they must follow the `tokens()` of the step before.
    """

    def __init__(self, operators: FusedOperators, max_rows: int, vocab: int, stream: Stream) -> None:
        self.max_rows, self._stream, device = max_rows, stream, stream.device
        fields = dict.fromkeys(FLOAT_PARAMS, (torch.float32, max_rows)) | {"top_k": (torch.int32, max_rows)}
        fields |= dict.fromkeys(("seed", "step"), (torch.int64, max_rows))
        self._params = DoubleBuffer(fields, stream)
        words = -(-vocab // 32)
        self._masks = DoubleBuffer({"rows": (torch.int32, max_rows)}, stream)
        self._host_words = [pinned_zeros((max_rows, words), torch.int32, device) for _ in range(2)]  # used in turn
        self._words = torch.zeros((max_rows, words), dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tokens_host = pinned_zeros((max_rows,), torch.int32, device)
        self._sample = operators.make_sampler(max_rows, vocab, device)

    def set_params(self, generations: Sequence[GenerationRequest]) -> None:
        """Starts uploading the parameters of the next step's rows. Further rows are greedy."""
        self._params.begin()
        host, count = self._params.host, len(generations)
        for name in (*FLOAT_PARAMS, "top_k"):
            host[name][:count] = [getattr(gen.params, name) for gen in generations]
        host["seed"][:count] = [(gen.seed + SEED_RANGE // 2) % SEED_RANGE - SEED_RANGE // 2 for gen in generations]
        host["step"][:count] = [gen.num_sampled for gen in generations]
        host["temperature"][count:] = 0.0
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
            self._stream.enqueue(lambda: copy_async(words, self._words[:count]))
        self._masks.upload()

    def resolve_placeholders(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Replaces each id -1 - i in token_ids [T] int32 by the token sampled last for row i. Can be captured.

        A negative last token (no token was allowed) becomes token 0; the results of such a row are not read.
        """
        last_tokens = self._tokens.index_select(0, (-1 - token_ids).clamp_(min=0))
        return torch.where(token_ids < 0, last_tokens, token_ids).clamp_(min=0)

    def sample(self, logits: torch.Tensor) -> None:
        """Samples a token for each row of logits [n, V]. Can be captured."""
        device, count = self._params.device, len(logits)
        inputs = SamplingInputs(*(device[name][:count] for name in SamplingInputs._fields))
        masks = RowMasks(self._words, self._masks.device["rows"][:count])
        self._sample(logits, inputs, LogitAdjustments(masks=masks), self._tokens[:count])

    def fetch(self, count: int) -> PendingTokens:
        """Starts copying the first `count` tokens to the host. The copy must end before the next `sample` runs."""
        host = self._tokens_host[:count]
        return PendingTokens(host, self._stream.copy_to_host(self._tokens[:count], host))
