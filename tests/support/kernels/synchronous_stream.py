"""A stream without a device: work runs as soon as it is enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from plait.runtime.executor.gpu.stream import DeviceWork, Event, PieceReplay


class CompletedEvent:
    """An event in the past."""

    is_complete = True

    def wait(self) -> None:
        pass


class ImmediateStream:
    """Runs work at once; captured work is run again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enqueue(self, work: DeviceWork) -> None:
        work()

    def capture(self, work: DeviceWork) -> DeviceWork:
        work()
        return work

    def capture_pieces(self, work: Callable[[DeviceWork], None]) -> PieceReplay:
        work(lambda: None)

        def replay(between: Sequence[DeviceWork]) -> None:
            left = iter(between)
            work(lambda: next(left)())

        return replay

    def record_event(self) -> Event:
        return CompletedEvent()

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        target.copy_(source)
        return CompletedEvent()
