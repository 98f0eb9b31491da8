"""Sampling that stays on the device: parameters, masks and tokens lie in buffers that never move.

Knows: sampling parameters, packed masks. Must not know: logits' origin, pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from plait.kernels.fused import FusedOperators
from plait.kernels.sampling_inputs import LogitShaping, RowMasks, SamplingInputs
from plait.runtime.gpu.buffers import TwinBuffers, copy, pinned
from plait.runtime.gpu.stream import Moment, Stream
from plait.runtime.sampler import Mask
from plait.runtime.scheduler.rows import Generation

FLOATS = ("temperature", "top_p", "min_p")
WORD = 1 << 64


def is_plain(gen: Generation) -> bool:
    """Whether the device's sampler has all that the generation asks for."""
    params = gen.params
    return not (params.logprobs or params.logit_bias or params.frequency_penalty or params.presence_penalty)


class Pending:
    """Tokens on their way to the host."""

    def __init__(self, tokens: torch.Tensor, moment: Moment) -> None:
        self._tokens, self._moment = tokens, moment

    @property
    def is_here(self) -> bool:
        return self._moment.has_come

    def tokens(self) -> list[int]:
        """Waits for them."""
        self._moment.wait()
        found: list[int] = self._tokens.tolist()
        return found


class DeviceSampling:
    """For steps of up to `max_rows` sampled rows, one after the other."""

    def __init__(self, operators: FusedOperators, max_rows: int, vocab: int, stream: Stream) -> None:
        self.max_rows, self._stream, device = max_rows, stream, stream.device
        fields = dict.fromkeys(FLOATS, (torch.float32, max_rows)) | {"top_k": (torch.int32, max_rows)}
        fields |= dict.fromkeys(("seed", "step"), (torch.int64, max_rows))
        self._params = TwinBuffers(fields, stream)
        words = -(-vocab // 32)
        self._masks = TwinBuffers({"rows": (torch.int32, max_rows)}, stream)
        self._words_hosts = [pinned((max_rows, words), torch.int32, device) for _ in range(2)]  # in turn, too
        self._words = torch.zeros((max_rows, words), dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tokens_host = pinned((max_rows,), torch.int32, device)
        self._sample = operators.make_sampler(max_rows, vocab, device)

    def set_params(self, generations: Sequence[Generation]) -> None:
        """Parameters of the rows of the next step, on their way to the device; rows beyond them are greedy."""
        self._params.begin()
        host, count = self._params.host, len(generations)
        for name in (*FLOATS, "top_k"):
            host[name][:count] = [getattr(gen.params, name) for gen in generations]
        host["seed"][:count] = [(gen.seed + WORD // 2) % WORD - WORD // 2 for gen in generations]
        host["step"][:count] = [gen.num_sampled for gen in generations]
        host["temperature"][count:] = 0.0
        self._params.upload()

    def set_mask(self, mask: Mask | None) -> None:
        """The next step's masks, on their way to the device."""
        self._masks.begin()  # the words went up before the rows
        rows = self._masks.host["rows"]
        rows.fill(-1)
        if mask is not None:
            count = len(mask.rows)
            rows[mask.rows] = np.arange(count, dtype=np.int32)
            self._words_hosts.reverse()
            words = self._words_hosts[0][:count]
            words[:, : mask.words.shape[1]] = torch.from_numpy(mask.words)
            self._stream.run(lambda: copy(words, self._words[:count]))
        self._masks.upload()

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int32 with -1 - slot replaced by what was drawn last for that row. Can be captured.

        A row for which no token was left (a negative one) goes on with any token: nobody will read what follows.
        """
        drawn = self._tokens.index_select(0, (-1 - token_ids).clamp_(min=0))
        return torch.where(token_ids < 0, drawn, token_ids).clamp_(min=0)

    def sample(self, logits: torch.Tensor) -> None:
        """Draws a token for each row of logits [n, V]. Can be captured."""
        device, count = self._params.device, len(logits)
        inputs = SamplingInputs(*(device[name][:count] for name in SamplingInputs._fields))
        masks = RowMasks(self._words, self._masks.device["rows"][:count])
        self._sample(logits, inputs, LogitShaping(masks=masks), self._tokens[:count])

    def fetch(self, count: int) -> Pending:
        """The first `count` tokens, on their way to the host. They must have arrived before anything else is drawn."""
        host = self._tokens_host[:count]
        return Pending(host, self._stream.copy_to_host(self._tokens[:count], host))
