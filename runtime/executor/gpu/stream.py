"""The device's queue of work: what is put in is done in that order, while the host goes on.

Captured work, copies to the host beside the queue, and points in it that can be waited for. `ImmediateStream` is a queue whose
work is done when it is put in; tests have others, which do it as late as they may.
Knows: CUDA graphs, streams, events. Must not know: what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

DeviceWork = Callable[[], None]


class Event(Protocol):
    """A point in the device's queue."""

    @property
    def is_complete(self) -> bool: ...

    def wait(self) -> None: ...


class Stream(Protocol):
    """See the file's header."""

    device: torch.device

    def enqueue(self, work: DeviceWork) -> None:
        """Puts work, whose memory on the host stays as it is until it is done, behind the rest."""

    def capture(self, work: DeviceWork) -> DeviceWork:
        """What repeats `work`, reading and writing the same memory, when it is `enqueue`. `work` is done once or more on
        the way, and all before it."""

    def record_event(self) -> Event:
        """The end of the queue as it is now."""

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Copies to the host, after all that is in the queue now, and beside what comes later: until the moment has
        come that must not write `source`."""


class CompletedEvent:
    """A moment that has come."""

    is_complete = True

    def wait(self) -> None:
        pass


class ImmediateStream:
    """Work is done at once, and repeated by doing it again: no device, no capture."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enqueue(self, work: DeviceWork) -> None:
        work()

    def capture(self, work: DeviceWork) -> DeviceWork:
        work()
        return work

    def record_event(self) -> Event:
        return CompletedEvent()

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        target.copy_(source)
        return CompletedEvent()


class CudaEvent:
    """A CUDA event that was recorded."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def is_complete(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        if not self._event.query():
            self._event.synchronize()


class CudaStream:
    """torch's current stream, and a second one for copies to the host. Captures (`torch.cuda.graph`) share one memory
    pool, for they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._main = torch.cuda.current_stream(device)
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def enqueue(self, work: DeviceWork) -> None:
        work()

    def capture(self, work: DeviceWork) -> DeviceWork:
        for _ in range(2):  # kernels are compiled, libraries set up
            work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def record_event(self) -> Event:
        return CudaEvent(self._main.record_event())

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        self._side.wait_event(self._main.record_event())
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        return CudaEvent(self._side.record_event())
