"""Launches steps that a GPU runs without the host: decode batches as CUDA graphs, batches with prompts in pieces.

Large batches run operator by operator. All steps are sampled on the device, with penalties, bias and masks, and have
their logprobs computed there; the logits of values that are drawn as a whole come to the host. Batches with guessed
tokens, or with a sampling parameter that the device's sampler lacks, are left to `SyncStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.config import EngineConfig
from plait.runtime.executor.gpu.cuda_graphs import PIECEWISE, GraphKey, GraphRunner, samples_only
from plait.runtime.executor.gpu.gpu_sampler import GpuSampler, PendingTokens, can_sample_on_device
from plait.runtime.executor.gpu.kv_pool_size import (
    MAX_DEFAULT_ROWS,
    CudaMemory,
    DeviceMemory,
    default_batch_rows,
    fit_pool,
)
from plait.runtime.executor.gpu.step_logprobs import LogprobBuffers, LogprobPlan
from plait.runtime.executor.gpu.stream import CudaStream, DeviceWork, Event, Stream
from plait.runtime.executor.step import logit_indices, pooled_states
from plait.runtime.executor.torch_device import upload
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.sampler import Sampler, SamplerOutput

NUM_TRIAL_CAPTURES = 5  # graphs captured to estimate the memory of all of them
MAX_GRAPH_ROWS = 1024  # a step of more rows reads so much KV that the host launches its operators meanwhile


class LaunchedForward(NamedTuple):
    """A forward pass on the device. The functions return what it has computed, once it is done."""

    sample_work: DeviceWork
    logits: Callable[[], torch.Tensor]  # [num_logits, V]
    hidden: Callable[[], torch.Tensor] | None = None  # [num_logits + num_states, C]; None: not kept


class AsyncStep:
    """A step sampled on the device. Implements `InFlightStep`.

    Call `sample` only after the step before was collected, because they share buffers. Rows that have ended since the
    launch are sampled too: the batch's shape is fixed by then.
    """

    def __init__(self, batch: Batch, runner: TorchRunner, sampling: GpuSampler, forward: LaunchedForward) -> None:
        self._rows, self._runner, self._sampling, self._forward = batch.rows, runner, sampling, forward
        self._generations = [gen for _, gen in batch.sampled_requests]
        self._has_states = batch.num_states > 0
        self._plan = LogprobPlan.of(batch.rows)
        self._probabilities = ProbabilityRows(batch.rows)
        self._pending: PendingTokens | None = None
        self._logprobs: LogprobBuffers | None = None
        self._end: Event | None = None

    @property
    def can_overlap(self) -> bool:
        """Pooled states are read by the host, which waits for them."""
        return not self._has_states

    @torch.inference_mode()
    def sample(self, mask: TokenMask | None) -> None:
        if self._generations:
            self._sampling.set_mask(mask)
            self._sampling.enqueue(self._generations, self._forward.sample_work)
            self._pending = self._sampling.fetch(len(self._generations))
        if not self._plan.is_empty:
            self._logprobs = self._sampling.logprobs(self._plan, self._forward.logits)
        self._probabilities.fetch(self._forward.logits, self._runner.config.vocab_size, self._sampling.stream)
        if self._has_states:
            self._end = self._sampling.stream.record_event()

    @property
    def is_done(self) -> bool:
        has_tokens = self._pending is None or self._pending.is_ready
        has_logprobs = self._logprobs is None or self._logprobs.is_ready
        has_states = self._end is None or self._end.is_complete
        return has_tokens and has_logprobs and has_states and self._probabilities.is_ready

    def collect(self) -> SamplerOutput:
        output = SamplerOutput()
        if self._pending is not None:
            output.tokens |= zip(self._generations, self._pending.tokens(), strict=True)
        if self._logprobs is not None:
            self._logprobs.add_to(output)
        self._probabilities.add_to(output)
        if self._end is not None:
            assert self._forward.hidden is not None
            self._end.wait()
            output.states = pooled_states(self._runner, self._forward.hidden(), self._rows)
        return output


class GpuStepLauncher:
    """Implements `AsyncStepLauncher` for `stream`. With `capture` False it uses no graphs."""

    def __init__(self, runner: TorchRunner, max_batch_rows: int, stream: Stream, capture: bool = True) -> None:
        assert runner.kernels.fused is not None
        self.runner, self.stream, self.max_batch_rows = runner, stream, max_batch_rows
        if runner.adapter_slots is not None:
            runner.adapter_slots.enqueue = stream.enqueue
        self.sampling = GpuSampler(runner.kernels.fused, max_batch_rows, runner.config.vocab_size, stream)
        self.graphs: GraphRunner | None = None
        if capture:
            self.graphs = GraphRunner(runner, self.sampling, stream, min(max_batch_rows, MAX_GRAPH_ROWS))
        self.num_graph_replays = self.num_piecewise = self.num_overlapped = 0

    @torch.inference_mode()
    def launch(self, batch: Batch, *, overlapped: bool) -> AsyncStep | None:
        """Starts a step's forward pass; None if the device's sampler lacks something that a row needs.

        An overlapped step is refused also if its graph is not captured yet: the capture's trial runs would overwrite
        the tokens of the step in flight.
        """
        if not all(_is_for_device(row) for row in batch.rows):
            return None
        key = self.graphs.graph_key(batch) if self.graphs is not None else None
        if key is None or self.graphs is None:
            forward = self._launch_head(batch, self._states(batch))
        elif overlapped and not self.graphs.is_captured(key):
            return None
        else:
            forward = self._replay(self.graphs, batch, key)
        self.num_overlapped += overlapped
        return AsyncStep(batch, self.runner, self.sampling, forward)

    def _replay(self, graphs: GraphRunner, batch: Batch, key: GraphKey) -> LaunchedForward:
        """Starts the forward pass in graphs."""
        self.num_graph_replays += 1
        self.num_piecewise += key.q_len == PIECEWISE
        if samples_only(batch):
            num_logits = batch.num_logits
            return LaunchedForward(graphs.forward(batch, key), lambda: graphs.logits(num_logits))
        return self._launch_head(batch, graphs.piecewise_states(batch, key))

    def _states(self, batch: Batch) -> Callable[[], torch.Tensor]:
        """Uploads the batch; returns its forward pass operator by operator, as device work that returns the states."""
        inputs = self.runner.prepare_inputs(batch)

        def states() -> torch.Tensor:
            resolved = inputs._replace(token_ids=self.sampling.resolve_placeholders(inputs.token_ids))
            return self.runner.run_forward(resolved)

        return states

    def _launch_head(self, batch: Batch, compute_states: Callable[[], torch.Tensor]) -> LaunchedForward:
        """Starts a forward pass, and the logits operator by operator."""
        sampled = [index for index, _ in batch.sampled_requests]
        for_logits = logit_indices(batch.rows) if batch.num_states else None
        updates = self.runner.head_updates(batch)
        hidden: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []

        def forward() -> None:
            states = compute_states()
            if for_logits is not None:
                hidden.append(states)
                states = states[for_logits]
            if len(states):
                logits.append(self.runner.model.unconverted_logits(states, updates))

        def sample() -> None:
            is_sampled = logits[0] if len(sampled) == len(logits[0]) else logits[0][sampled]
            self.sampling.sample(is_sampled)

        self.stream.enqueue(forward)
        return LaunchedForward(sample, lambda: logits[0], (lambda: hidden[0]) if for_logits is not None else None)


def _is_for_device(row: ScheduledRequest) -> bool:
    """Whether the device can compute all that the row asks for. Guessed tokens are verified on the host."""
    return not isinstance(row.request, GenerationRequest) or (
        not row.num_draft_tokens and can_sample_on_device(row.request)
    )


def make_gpu_step_launcher(
    config: EngineConfig, runner: TorchRunner, progress: Callable[[float], None] = lambda fraction: None
) -> GpuStepLauncher | None:
    """Chooses the size of the KV pool; returns a launcher with all graphs captured.

    None without CUDA, where the pool keeps its size, and without Triton's operators.
    """
    if runner.device.type != "cuda":
        return None
    return prepare_device(config, runner, CudaMemory(runner.device), lambda: CudaStream(runner.device), progress)


def prepare_device(
    config: EngineConfig,
    runner: TorchRunner,
    memory: DeviceMemory,
    make_stream: Callable[[], Stream],
    progress: Callable[[float], None] = lambda fraction: None,
) -> GpuStepLauncher | None:
    """`make_gpu_step_launcher` for a device with this memory."""

    def capture_trial() -> tuple[object, int]:
        return _capture_trial(config, runner, memory, make_stream()) if runner.kernels.fused is not None else (None, 0)

    fit_pool(runner, config, memory, capture_trial)
    if runner.kernels.fused is None:
        return None
    max_batch_rows = config.max_batch_rows or default_batch_rows(runner.num_pages)
    launcher = GpuStepLauncher(runner, max_batch_rows, make_stream(), config.cuda_graphs)
    if launcher.graphs is not None:
        with torch.inference_mode():
            launcher.graphs.capture_all(progress)
    return launcher


def _capture_trial(
    config: EngineConfig, runner: TorchRunner, memory: DeviceMemory, stream: Stream
) -> tuple[GpuStepLauncher, int]:
    """Allocates the buffers of the largest launcher and captures its largest graphs, for `profile_memory`.

    The graphs share the memory of their activations; each further one takes as much more as the last ones did.
    """
    runner.max_session_tokens = runner.context_length  # the page table's, with the final pool
    launcher = GpuStepLauncher(runner, config.max_batch_rows or MAX_DEFAULT_ROWS, stream, config.cuda_graphs)
    if launcher.graphs is None:
        return launcher, 0
    keys = launcher.graphs.all_keys()
    with torch.inference_mode():
        launcher.graphs.capture_all(keys=keys[:1])
        free_after_first = memory.free()
        further = keys[1:NUM_TRIAL_CAPTURES]
        launcher.graphs.capture_all(keys=further)
    bytes_per_graph = max(0, free_after_first - memory.free()) // max(1, len(further))
    return launcher, bytes_per_graph * max(0, len(keys) - NUM_TRIAL_CAPTURES)


# -- step probabilities ---------------------------------------------------------------------------
# The logits of a step's rows whose calls draw their value as a whole (`exact`, `particles`), copied to the host.
#
# The host computes their probabilities as its own sampler does, so the other rows of the step stay on the device.


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
