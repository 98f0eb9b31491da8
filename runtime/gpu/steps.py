"""Steps that a GPU does without the host's waiting: decode in captured graphs, mixed batches operator by operator.

Both sample on the device, and only the tokens come back. What the device's sampler does not have (logprobs, scores,
logit_bias, penalties) is left to the plain path.
Knows: which batch goes which way. Must not know: sessions, how a graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.runtime.config import EngineConfig
from plait.runtime.gpu.decode_graph import DecodeGraphs
from plait.runtime.gpu.device_sampling import DeviceSampling, Pending, is_plain
from plait.runtime.gpu.stream import CudaStream, Stream, Work
from plait.runtime.model_runner import ModelRunner
from plait.runtime.sampler import Mask, Sampled
from plait.runtime.scheduler.rows import Batch, BatchRow, Generation

MOST_GRAPH_ROWS = 512  # beyond, padding and page table cost more than launching operators does


class DeviceFlight:
    """A step whose tokens are drawn on the device. `sample` not before the step ahead of it was collected: buffers are
    shared. Rows that have ended since the launch are drawn for, too: the batch's shape is fixed by then."""

    can_be_followed = True

    def __init__(self, batch: Batch, sampling: DeviceSampling, stream: Stream, draw: Work) -> None:
        self._generations = [gen for _, gen in batch.sampled]
        self._sampling, self._stream, self._draw = sampling, stream, draw
        self._pending: Pending | None = None

    @torch.inference_mode()
    def sample(self, mask: Mask | None) -> None:
        if self._generations:
            self._sampling.set_params(self._generations)
            self._sampling.set_mask(mask)
            self._stream.run(self._draw)
            self._pending = self._sampling.fetch(len(self._generations))

    @property
    def is_done(self) -> bool:
        return self._pending is None or self._pending.is_here

    def collect(self) -> Sampled:
        if self._pending is None:  # chunks of prompts alone: nobody waits for them
            return Sampled()
        return Sampled(tokens=dict(zip(self._generations, self._pending.tokens(), strict=True)))


class GpuSteps:
    """See the file's header. `capture` False: no graphs."""

    def __init__(self, runner: ModelRunner, max_batch_rows: int, stream: Stream, capture: bool = True) -> None:
        assert runner.kernels.fused is not None
        self.runner, self.stream = runner, stream
        self.sampling = DeviceSampling(runner.kernels.fused, max_batch_rows, runner.config.vocab_size, stream)
        self.graphs: DecodeGraphs | None = None
        if capture:
            self.graphs = DecodeGraphs(runner, self.sampling, stream, min(max_batch_rows, MOST_GRAPH_ROWS))
        self.num_replays = self.num_followed = 0

    @torch.inference_mode()
    def launch(self, batch: Batch, *, behind: bool) -> DeviceFlight | None:
        """The flight of a batch, its forward begun; None if some row asks for more than tokens, or if a graph is to be
        captured, whose trial runs would draw over the tokens of the step under way."""
        if not all(_gives_tokens_only(each) for each in batch.rows):
            return None
        size = self.graphs.size_of(batch) if self.graphs is not None else None
        if size is None or self.graphs is None:
            draw = self._forward(batch)
        elif behind and size not in self.graphs.graphs:
            return None
        else:
            self.num_replays += 1
            draw = self.graphs.forward(batch, size)
        self.num_followed += behind
        return DeviceFlight(batch, self.sampling, self.stream, draw)

    def _forward(self, batch: Batch) -> Work:
        """Starts the batch's forward operator by operator, and gives what samples from it."""
        inputs, hidden = self.runner.prepare_inputs(batch), []

        def forward() -> None:
            known = inputs._replace(token_ids=self.sampling.known(inputs.token_ids))
            hidden.append(self.runner.compute(known))

        self.stream.run(forward)
        return lambda: self.sampling.sample(self.runner.model.logits(hidden[0]))


def _gives_tokens_only(each: BatchRow) -> bool:
    return isinstance(each.row, Generation) and each.num_logits == each.is_sampled and is_plain(each.row)


def gpu_steps(
    config: EngineConfig, runner: ModelRunner, progress: Callable[[float], None] = lambda share: None
) -> GpuSteps | None:
    """The steps of a model on an NVIDIA GPU, decode captured; None elsewhere, or where Triton's operators are not."""
    if runner.device.type != "cuda" or runner.kernels.fused is None:
        return None
    steps = GpuSteps(runner, config.max_batch_rows, CudaStream(runner.device), config.cuda_graphs)
    if steps.graphs is not None:
        with torch.inference_mode():
            steps.graphs.capture_decode(progress)
    return steps
