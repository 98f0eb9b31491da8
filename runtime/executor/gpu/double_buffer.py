"""Named arrays that the host fills and the device reads, always in the same place; one copy moves them all.

Knows: memory. Must not know: what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plait.runtime.executor.gpu.stream import Event, Stream

ALIGN_BYTES = 16  # bytes
NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class DoubleBuffer:
    """`host[name]` (numpy, in pinned memory) and `device[name]` (torch), one array for each of `fields`.

    Fill the host's between `begin()` and `upload()`. There are two of them, in turn: `begin()` waits until the copy
    before the last has been made, which it has been when the host is no more than a step ahead of the device.

    >>> from plait.runtime.executor.gpu.stream import ImmediateStream
    >>> twins = DoubleBuffer({"a": (torch.int32, 2)}, ImmediateStream(torch.device("cpu")))
    >>> twins.begin()
    >>> twins.host["a"][:] = 7
    >>> twins.upload()
    >>> twins.device["a"].tolist()
    [7, 7]
    """

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, int]], stream: Stream) -> None:
        self._stream, size = stream, 0
        slices: dict[str, tuple[slice, torch.dtype]] = {}
        for name, (dtype, length) in fields.items():
            slices[name] = slice(size, size + length * dtype.itemsize), dtype
            size += -(-length * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        self._device = torch.zeros(size, dtype=torch.uint8, device=stream.device)
        self.device = {name: self._device[place].view(dtype) for name, (place, dtype) in slices.items()}
        self._host_buffers = [
            _HostBuffer(pinned_zeros((size,), torch.uint8, stream.device), slices, stream.record_event())
            for _ in range(2)
        ]

    @property
    def host(self) -> dict[str, npt.NDArray[Any]]:
        return self._host_buffers[0].arrays

    def begin(self) -> None:
        self._host_buffers.reverse()
        self._host_buffers[0].uploaded.wait()

    def upload(self) -> None:
        side = self._host_buffers[0]
        self._stream.enqueue(lambda: copy_async(side.memory, self._device))
        side.uploaded = self._stream.record_event()


class _HostBuffer:
    """One of the two that the host fills."""

    def __init__(self, memory: torch.Tensor, slices: dict[str, tuple[slice, torch.dtype]], uploaded: Event) -> None:
        self.memory, self.uploaded = memory, uploaded
        self.arrays = {name: memory[at].numpy().view(NUMPY_DTYPES[dtype]) for name, (at, dtype) in slices.items()}


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in the host's memory, from where a GPU copies by itself."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def copy_async(source: torch.Tensor, target: torch.Tensor) -> None:
    """Without waiting for it."""
    target.copy_(source, non_blocking=True)
