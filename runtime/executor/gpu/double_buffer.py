"""Named arrays that the host fills and the device reads at fixed addresses, uploaded together by one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plait.runtime.executor.gpu.stream import Event, Stream
from plait.runtime.executor.torch_device import UPLOAD_ALIGN_BYTES

NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class DoubleBuffer:
    """`host[name]` (numpy, pinned memory) and `device[name]` (torch): one array for each of `fields`.

    `fields` maps names to (dtype, length). Fill the host's arrays between `begin()` and `upload()`. There are two host
    buffers, used in turn: `begin()` waits for the copy before the last, which is complete when the host is at most one
    step ahead of the device.

    >>> buffer = DoubleBuffer({"a": (torch.int32, 2)}, stream)            # doctest: +SKIP
    >>> buffer.begin()                                                    # doctest: +SKIP
    >>> buffer.host["a"][:] = 7                                           # doctest: +SKIP
    >>> buffer.upload()                                                   # doctest: +SKIP
    >>> buffer.device["a"].tolist()                                       # doctest: +SKIP
    [7, 7]
    """

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, int]], stream: Stream) -> None:
        self._stream, size = stream, 0
        slices: dict[str, tuple[slice, torch.dtype]] = {}
        for name, (dtype, length) in fields.items():
            slices[name] = slice(size, size + length * dtype.itemsize), dtype
            size += -(-length * dtype.itemsize // UPLOAD_ALIGN_BYTES) * UPLOAD_ALIGN_BYTES
        self._device = torch.zeros(size, dtype=torch.uint8, device=stream.device)
        self.device = {name: self._device[part].view(dtype) for name, (part, dtype) in slices.items()}
        self._host_buffers = [
            _HostBuffer(pinned_zeros((size,), torch.uint8, stream.device), slices, stream.record_event())
            for _ in range(2)
        ]

    @property
    def host(self) -> dict[str, npt.NDArray[Any]]:
        return self._host_buffers[0].arrays

    def begin(self) -> None:
        """Switches to the other host buffer, once its last upload is complete."""
        self._host_buffers.reverse()
        self._host_buffers[0].uploaded.wait()

    def upload(self) -> None:
        """Enqueues the copy of the current host buffer to the device."""
        buffer = self._host_buffers[0]
        self._stream.enqueue(lambda: copy_async(buffer.memory, self._device))
        buffer.uploaded = self._stream.record_event()


class _HostBuffer:
    def __init__(self, memory: torch.Tensor, slices: dict[str, tuple[slice, torch.dtype]], uploaded: Event) -> None:
        self.memory, self.uploaded = memory, uploaded
        self.arrays = {name: memory[part].numpy().view(NUMPY_DTYPES[dtype]) for name, (part, dtype) in slices.items()}


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros in host memory, pinned if `device` is a GPU, which then copies from it asynchronously."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def copy_async(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies without waiting for the copy to end."""
    target.copy_(source, non_blocking=True)
