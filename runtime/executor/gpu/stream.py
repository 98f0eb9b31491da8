"""A device's work queue: ordered work, captured work, copies to the host, and events.

Tests have streams without a device: they run work at once, or as late as they are allowed to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

DeviceWork = Callable[[], None]
PieceReplay = Callable[[Sequence[DeviceWork]], None]  # between[i] runs behind piece i
NUM_WARM_UP_RUNS = 2


class Event(Protocol):
    """A point in a stream."""

    @property
    def is_complete(self) -> bool: ...

    def wait(self) -> None: ...


class Stream(Protocol):
    """Runs work in the order in which it is enqueued, while the host continues."""

    device: torch.device

    def enqueue(self, work: DeviceWork) -> None:
        """Adds work to the end of the queue. Host memory that it reads must not change before it is done."""

    def capture(self, work: DeviceWork) -> DeviceWork:
        """Returns work that repeats `work` on the same memory when enqueued.

        Runs `work` at least once, after everything that was enqueued before.
        """

    def capture_pieces(self, work: Callable[[DeviceWork], None]) -> PieceReplay:
        """Captures `work(split)` in pieces, which end where it calls `split()`. Returns what repeats them.

        What is returned enqueues nothing: call it in enqueued work. `work` runs at least once, as in `capture`, with
        nothing between the pieces.
        """

    def record_event(self) -> Event:
        """Returns the current end of the queue."""

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Copies `source` to the host behind all work enqueued so far, in parallel to later work.

        Later work must not write `source` before the returned event is complete.
        """


class CudaEvent:
    """A recorded CUDA event."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def is_complete(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        if not self._event.query():
            self._event.synchronize()


class CudaStream:
    """Torch's current stream, and a second one for copies to the host.

    CUDA graphs share one memory pool, because they never run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._main = torch.cuda.current_stream(device)
        self._copy_stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._capture_stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def enqueue(self, work: DeviceWork) -> None:
        work()

    def capture(self, work: DeviceWork) -> DeviceWork:
        for _ in range(NUM_WARM_UP_RUNS):  # compiles kernels and initializes libraries, which a capture cannot do
            work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Graphs share memory only if they are captured on the same stream.
        with torch.cuda.graph(graph, self._pool, self._capture_stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def capture_pieces(self, work: Callable[[DeviceWork], None]) -> PieceReplay:
        for _ in range(NUM_WARM_UP_RUNS):
            work(lambda: None)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # once, as `torch.cuda.graph` does for every graph
        graphs: list[Any] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(self._pool, capture_error_mode="thread_local")

        def split() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self._capture_stream):
            begin()
            try:
                work(split)
            finally:
                graphs[-1].capture_end()
        self._main.wait_stream(self._capture_stream)
        first, *others = [graph.replay for graph in graphs]

        def replay(between: Sequence[DeviceWork]) -> None:
            first()
            for launch, piece in zip(between, others, strict=True):
                launch()
                piece()

        return replay

    def record_event(self) -> Event:
        return CudaEvent(self._main.record_event())

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        self._copy_stream.wait_event(self._main.record_event())
        with torch.cuda.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
        return CudaEvent(self._copy_stream.record_event())
