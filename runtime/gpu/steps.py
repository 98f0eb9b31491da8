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
from plait.runtime.gpu.recorder import CudaRecorder, Recorder
from plait.runtime.model_runner import ModelRunner
from plait.runtime.sampler import Mask, Sampled
from plait.runtime.scheduler.rows import Batch, BatchRow, Generation

MOST_GRAPH_ROWS = 512  # beyond, padding and page table cost more than launching operators does


class DeviceFlight:
    """A step whose tokens are drawn on the device. One at a time: the buffers are shared."""

    def __init__(self, batch: Batch, sampling: DeviceSampling, draw: Callable[[], None]) -> None:
        self._generations = [gen for _, gen in batch.sampled_rows()]
        self._sampling, self._draw = sampling, draw
        self._pending: Pending | None = None
        if self._generations:
            sampling.set_params(self._generations)

    @torch.inference_mode()
    def sample(self, mask: Mask | None) -> None:
        if self._generations:
            self._sampling.set_mask(mask)
            self._draw()
            self._pending = self._sampling.fetch(len(self._generations))

    @property
    def is_done(self) -> bool:
        return self._pending is None or self._pending.is_here

    def collect(self) -> Sampled:
        if self._pending is None:  # chunks of prompts alone: nobody waits for them
            return Sampled()
        return Sampled(tokens=dict(zip(self._generations, self._pending.tokens(), strict=True)))


class GpuSteps:
    """See the file's header. `recorder` None: no graphs."""

    def __init__(self, runner: ModelRunner, max_batch_rows: int, recorder: Recorder | None) -> None:
        assert runner.kernels.fused is not None
        self.runner = runner
        vocab = runner.config.vocab_size
        self.sampling = DeviceSampling(runner.kernels.fused, max_batch_rows, vocab, runner.device)
        self.graphs: DecodeGraphs | None = None
        if recorder is not None:
            self.graphs = DecodeGraphs(runner, self.sampling, recorder, min(max_batch_rows, MOST_GRAPH_ROWS))
        self.num_replays = 0

    @torch.inference_mode()
    def launch(self, batch: Batch) -> DeviceFlight | None:
        """The flight of a batch, its forward begun; None if some row asks for more than tokens."""
        if not all(_gives_tokens_only(each) for each in batch.rows):
            return None
        size = self.graphs.size_of(batch) if self.graphs is not None else None
        if size is not None and self.graphs is not None:
            self.num_replays += 1
            return DeviceFlight(batch, self.sampling, self.graphs.forward(batch, size))
        hidden = self.runner.forward(batch)
        return DeviceFlight(batch, self.sampling, lambda: self.sampling.sample(self.runner.model.logits(hidden)))


def _gives_tokens_only(each: BatchRow) -> bool:
    return isinstance(each.row, Generation) and each.num_logits == each.is_sampled and is_plain(each.row)


def gpu_steps(
    config: EngineConfig, runner: ModelRunner, progress: Callable[[float], None] = lambda share: None
) -> GpuSteps | None:
    """The steps of a model on an NVIDIA GPU, decode captured; None elsewhere, or where Triton's operators are not."""
    if runner.device.type != "cuda" or runner.kernels.fused is None:
        return None
    steps = GpuSteps(runner, config.max_batch_rows, CudaRecorder() if config.cuda_graphs else None)
    if steps.graphs is not None:
        with torch.inference_mode():
            steps.graphs.capture_decode(progress)
    return steps
