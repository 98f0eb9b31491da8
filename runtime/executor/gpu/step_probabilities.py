"""The logits of a step's rows whose calls draw their value as a whole (`exact`, `particles`), copied to the host.

The host computes their probabilities as its own sampler does, so the other rows of the step stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.executor.gpu.stream import Event, Stream
from plait.runtime.executor.torch_device import upload
from plait.runtime.sampling.sampler import Sampler, SamplerOutput


class ProbabilityRows:
    """Those of one step, float32 [n, V] in memory of their own."""

    def __init__(self, rows: Sequence[ScheduledRequest]) -> None:
        self._requests: list[tuple[GenerationRequest, int]] = []  # and the number of its rows
        self._indices: list[int] = []  # in the step's logits
        first_row = 0
        for scheduled in rows:
            request, count = scheduled.request, scheduled.num_logits
            if isinstance(request, GenerationRequest) and request.needs_probabilities and count:
                self._requests.append((request, count))
                self._indices += range(first_row, first_row + count)
            first_row += count
        self._host = torch.empty(0)
        self._copied: Event | None = None

    def fetch(self, logits: Callable[[], torch.Tensor], vocab: int, stream: Stream) -> None:
        """Starts copying the rows to the host. `logits`: called on the device; returns those of the step, [N, V]."""
        if not self._indices:
            return
        shape, is_cuda = (len(self._indices), vocab), stream.device.type == "cuda"
        needed = torch.empty(shape, dtype=torch.float32, device=stream.device)
        self._host = torch.empty(shape, dtype=torch.float32, pin_memory=is_cuda)
        (indices,) = upload([np.array(self._indices, dtype=np.int32)], stream.device)

        def gather() -> None:
            needed.copy_(logits().index_select(0, indices))

        stream.enqueue(gather)
        self._copied = stream.copy_to_host(needed, self._host)

    @property
    def is_ready(self) -> bool:
        """Whether `add_to` does not wait."""
        return self._copied is None or self._copied.is_complete

    def add_to(self, output: SamplerOutput) -> None:
        """Waits for the copy, and adds the probabilities to a step's output."""
        if self._copied is not None:
            self._copied.wait()
        sampler, logits, first = Sampler(), self._host.numpy(), 0
        for request, count in self._requests:
            output.probabilities[request] = sampler.probabilities(logits[first : first + count], request)
            first += count
