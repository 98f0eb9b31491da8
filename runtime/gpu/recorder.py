"""How a piece of work becomes something that can be repeated: captured by CUDA, or simply called again.

Knows: CUDA graphs. Must not know: what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Recorder(Protocol):
    def record(self, work: Work) -> Work:
        """What repeats `work`, reading and writing the same memory. `work` is done once or more on the way."""


class Repeating:
    """No capture: the work itself is what repeats it. For tests, which so run all but CUDA's own part."""

    def record(self, work: Work) -> Work:
        work()
        return work


class CudaRecorder:
    """Captures with `torch.cuda.graph`; all captures share one memory pool, for they never run side by side."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        for _ in range(2):  # kernels are compiled, libraries set up
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay
