"""Launches steps that a GPU runs without the host: decode batches as CUDA graphs, mixed batches operator by operator.

Both sample on the device, and only token ids return to the host. Batches that need what the device's sampler lacks
(logprobs, scores, logit_bias, penalties) are left to `SyncStep`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.config import EngineConfig
from plait.runtime.executor.gpu.cuda_graphs import DecodeGraphRunner
from plait.runtime.executor.gpu.gpu_sampler import GpuSampler, PendingTokens, can_sample_on_device
from plait.runtime.executor.gpu.stream import CudaStream, DeviceWork, Stream
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.sampler import SamplerOutput

MAX_GRAPH_ROWS = 512  # for more rows, padding and the page table cost more than launching the operators one by one


class AsyncStep:
    """A step sampled on the device. Implements `InFlightStep`.

    Call `sample` only after the step before was collected, because they share buffers. Rows that have ended since the
    launch are sampled too: the batch's shape is fixed by then.
    """

    can_overlap = True

    def __init__(self, batch: Batch, sampling: GpuSampler, stream: Stream, sample_work: DeviceWork) -> None:
        self._generations = [gen for _, gen in batch.sampled_requests]
        self._sampling, self._stream, self._sample_work = sampling, stream, sample_work
        self._pending: PendingTokens | None = None

    @torch.inference_mode()
    def sample(self, mask: TokenMask | None) -> None:
        if self._generations:
            self._sampling.set_params(self._generations)
            self._sampling.set_mask(mask)
            self._stream.enqueue(self._sample_work)
            self._pending = self._sampling.fetch(len(self._generations))

    @property
    def is_done(self) -> bool:
        return self._pending is None or self._pending.is_ready

    def collect(self) -> SamplerOutput:
        if self._pending is None:  # the batch had only prompt chunks, which sample nothing
            return SamplerOutput()
        return SamplerOutput(tokens=dict(zip(self._generations, self._pending.tokens(), strict=True)))


class GpuStepLauncher:
    """Implements `AsyncStepLauncher` for `stream`. With `capture` False it uses no graphs."""

    def __init__(self, runner: TorchRunner, max_batch_rows: int, stream: Stream, capture: bool = True) -> None:
        assert runner.kernels.fused is not None
        self.runner, self.stream = runner, stream
        self.sampling = GpuSampler(runner.kernels.fused, max_batch_rows, runner.config.vocab_size, stream)
        self.graphs: DecodeGraphRunner | None = None
        if capture:
            self.graphs = DecodeGraphRunner(runner, self.sampling, stream, min(max_batch_rows, MAX_GRAPH_ROWS))
        self.num_graph_replays = self.num_overlapped = 0

    @torch.inference_mode()
    def launch(self, batch: Batch, *, overlapped: bool) -> AsyncStep | None:
        """Starts a step's forward pass; None if a row needs more than sampled tokens.

        An overlapped step is refused also if its graph is not captured yet: the capture's trial runs would overwrite
        the tokens of the step in flight.
        """
        if not all(_needs_tokens_only(row) for row in batch.rows):
            return None
        key = self.graphs.graph_key(batch) if self.graphs is not None else None
        if key is None or self.graphs is None:
            sample_work = self._forward(batch)
        elif overlapped and key not in self.graphs.graphs:
            return None
        else:
            self.num_graph_replays += 1
            sample_work = self.graphs.forward(batch, key)
        self.num_overlapped += overlapped
        return AsyncStep(batch, self.sampling, self.stream, sample_work)

    def _forward(self, batch: Batch) -> DeviceWork:
        """Starts the forward pass operator by operator. Returns the sampling work."""
        inputs, hidden = self.runner.prepare_inputs(batch), []

        def forward() -> None:
            resolved = inputs._replace(token_ids=self.sampling.resolve_placeholders(inputs.token_ids))
            hidden.append(self.runner.run_forward(resolved))

        self.stream.enqueue(forward)
        return lambda: self.sampling.sample(self.runner.model.logits(hidden[0]))


def _needs_tokens_only(row: ScheduledRequest) -> bool:
    return (
        isinstance(row.request, GenerationRequest)
        and row.num_logits == row.is_sampled
        and can_sample_on_device(row.request)
    )


def make_gpu_step_launcher(
    config: EngineConfig, runner: TorchRunner, progress: Callable[[float], None] = lambda fraction: None
) -> GpuStepLauncher | None:
    """Returns a launcher with all graphs captured; None without CUDA or without Triton's operators."""
    if runner.device.type != "cuda" or runner.kernels.fused is None:
        return None
    launcher = GpuStepLauncher(runner, config.max_batch_rows, CudaStream(runner.device), config.cuda_graphs)
    if launcher.graphs is not None:
        with torch.inference_mode():
            launcher.graphs.capture_all(progress)
    return launcher
