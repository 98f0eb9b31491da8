"""Chooses the size of a GPU's KV pool, and the rows of a batch, after trying what else takes memory.

    free memory  =  KV pool  +  activations of the largest step  +  graphs and static buffers  +  reserve

The weights are loaded, and the model has a small trial pool. The largest forward pass is run, and the largest graphs
are captured; what they took is left free when the pool is allocated (the method of vLLM's memory profiling).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from plait.runtime.batch.batch import MAX_LOGITS, Batch
from plait.runtime.config import EngineConfig
from plait.runtime.executor.runner import LoadedRunner, add_text, choose_num_pages

RESERVE_FRACTION = 0.03  # of the GPU's memory: fragmentation, and libraries that allocate on first use
MIN_RESERVE_BYTES = 256 << 20
MAX_DEFAULT_ROWS = 512
MIN_DEFAULT_ROWS = 64
TOKENS_PER_ROW = 512  # of the pool, for each row of a batch: about a chat's prompt and answer
ROWS_STEP = 8  # numbers of rows are multiples of it, as the sizes of the graphs


class DeviceMemory(Protocol):
    """The memory of a device, in bytes."""

    def free(self) -> int:
        """What the device could still allocate, after giving back what the allocator caches."""

    def total(self) -> int: ...

    def peak_of(self, work: Callable[[], None]) -> int:
        """Runs `work`; returns how much more memory it used at its peak than was in use before."""


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """See `DeviceMemory`."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def total(self) -> int:
        """See `DeviceMemory`."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def peak_of(self, work: Callable[[], None]) -> int:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - before


class PoolRunner(LoadedRunner, Protocol):
    """A model runner whose pool can be replaced, see `TorchRunner`."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def missing_bytes(self) -> int: ...

    def allocate_pool(self, num_pages: int) -> None: ...


@dataclass(frozen=True)
class MemoryProfile:
    """What the KV pool must leave free, and what there is, in bytes. `free_bytes` counts the trial pool as free."""

    free_bytes: int  # beside the weights, before graphs
    total_bytes: int
    activation_bytes: int
    graph_bytes: int

    @property
    def pool_bytes(self) -> int:
        """What the pool may take; 0 if nothing is left."""
        reserve = max(int(self.total_bytes * RESERVE_FRACTION), MIN_RESERVE_BYTES)
        return max(0, self.free_bytes - self.activation_bytes - self.graph_bytes - reserve)


def profile_memory(
    runner: PoolRunner, memory: DeviceMemory, capture_trial: Callable[[], tuple[object, int]]
) -> MemoryProfile:
    """Runs the largest forward pass, then captures graphs.

    `capture_trial()` captures the largest graphs and returns what must stay alive to hold their memory, and by how much
    their memory will be exceeded by that of all graphs.
    """
    activation_bytes = memory.peak_of(lambda: run_largest_step(runner))
    free_before = memory.free()
    trial, more_bytes = capture_trial()
    graph_bytes = max(0, free_before - memory.free()) + more_bytes
    del trial
    trial_pool_bytes = runner.num_pages * runner.page_bytes
    return MemoryProfile(free_before + trial_pool_bytes, memory.total(), activation_bytes, graph_bytes)


def run_largest_step(runner: PoolRunner) -> None:
    """Runs a forward pass of `max_batch_tokens` tokens, and the logits of as many positions as a step may have.

    The tokens are in as few rows as the longest session allows. Rows may write to the same pages: nothing is read.
    """
    left = runner.max_batch_tokens
    longest = min(left, runner.max_session_tokens, runner.num_pages)
    num_logits = -(-MAX_LOGITS * longest // left)  # of a row
    batch = Batch(left)
    while left:
        count = min(left, longest)
        add_text(batch, [0] * count, list(range(count)), 0, max(0, count - num_logits))
        left -= count
    runner.logits(runner.forward(batch), {})


def default_batch_rows(num_pages: int) -> int:
    """Returns the rows of a batch for a pool of `num_pages` tokens: 64 to 512.

    >>> [default_batch_rows(pages) for pages in (10_000, 100_000, 1_000_000)]
    [64, 192, 512]
    """
    rows = num_pages // TOKENS_PER_ROW // ROWS_STEP * ROWS_STEP
    return min(MAX_DEFAULT_ROWS, max(MIN_DEFAULT_ROWS, rows))


def fit_pool(
    runner: PoolRunner,
    config: EngineConfig,
    memory: DeviceMemory,
    capture_trial: Callable[[], tuple[object, int]],
) -> MemoryProfile | None:
    """Replaces the runner's trial pool by one of the size that fits; None if the configuration fixes its size.

    Raises InputError if fewer pages fit than a runtime needs.
    """
    if config.kv_memory_bytes or config.max_pages:
        return None
    profile = profile_memory(runner, memory, capture_trial)
    num_pages = choose_num_pages(max(0, profile.pool_bytes - runner.missing_bytes), runner.page_bytes, 0)
    runner.allocate_pool(0)  # frees the trial pool first
    memory.free()
    runner.allocate_pool(num_pages)
    return profile
