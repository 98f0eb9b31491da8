"""Named arrays that the host fills and the device reads, always in the same place; one copy moves them all.

Knows: memory. Must not know: what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGN = 16  # bytes
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class Moment:
    """A point in the device's queue: `wait` until it has come. On the CPU it has."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    @property
    def has_come(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class TwinBuffers:
    """`host[name]` (numpy, in pinned memory) and `device[name]` (torch), one array for each of `fields`.

    Fill the host's between `begin()`, which waits until the copy before has been made, and `upload()`.

    >>> twins = TwinBuffers({"a": (torch.int32, 2)}, torch.device("cpu"))
    >>> twins.begin()
    >>> twins.host["a"][:] = 7
    >>> twins.upload()
    >>> twins.device["a"].tolist()
    [7, 7]
    """

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        starts, at = {}, 0
        for name, (dtype, length) in fields.items():
            starts[name] = at
            at += -(-length * dtype.itemsize // ALIGN) * ALIGN
        self._host = torch.zeros(at, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(at, dtype=torch.uint8, device=device)
        self._uploaded = Moment(device)
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, torch.Tensor] = {}
        for name, (dtype, length) in fields.items():
            place = slice(starts[name], starts[name] + length * dtype.itemsize)
            self.host[name] = self._host[place].numpy().view(NUMPY[dtype])
            self.device[name] = self._device[place].view(dtype)

    def begin(self) -> None:
        self._uploaded.wait()

    def upload(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        self._uploaded = Moment(self._device.device)
