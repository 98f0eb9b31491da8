"""Reads parts of files into tensors by several threads: into host memory directly, to a GPU through pinned buffers.

file ─ pread, one thread each ─▶ pinned buffer ─ copied by the GPU meanwhile ─▶ the tensor's place
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 16 << 20
MAX_THREADS = 8


class ParallelReader:
    """Reads into tensors on one device. The threads end with `close`, or with the object.

    `num_buffers` staging buffers of `chunk_bytes`, twice as many as threads, are allocated for a GPU only.
    """

    def __init__(self, device: torch.device, num_threads: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        num_threads = num_threads or min(MAX_THREADS, max(2, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(num_threads, "weight-reader")
        self._staging: queue.SimpleQueue[tuple[torch.Tensor, Any]] = queue.SimpleQueue()
        if device.type == "cuda":
            self.add_staging(2 * num_threads, is_pinned=True)

    def add_staging(self, count: int, is_pinned: bool) -> None:
        """Allocates `count` buffers; with any, every chunk is copied through one."""
        import torch

        for _ in range(count):
            self._staging.put((torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=is_pinned), None))
        self._is_staged = True

    _is_staged = False

    def read(self, path: Path, begin: int, target: torch.Tensor) -> None:
        """Fills the contiguous `target` with the bytes of the file from `begin` on.

        On a GPU the last copies may still run: work on the current stream follows them. Raises EOFError if the file is
        shorter, OSError if it cannot be read.
        """
        import torch

        flat = target.view(-1).view(torch.uint8)
        with _opened(path) as fd:
            starts = range(0, len(flat), self._chunk_bytes)
            jobs = [self._pool.submit(self._read_chunk, fd, begin + i, flat[i : i + self._chunk_bytes]) for i in starts]
            errors = [error for job in jobs if (error := job.exception()) is not None]  # waits for all of them
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._pool.shutdown()

    def _read_chunk(self, fd: int, begin: int, target: torch.Tensor) -> None:
        if not self._is_staged:
            _fill(fd, begin, target)
            return
        import torch

        buffer, copied = self._staging.get()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            if copied is not None:
                copied.synchronize()
            part = buffer[: len(target)]
            _fill(fd, begin, part)
            target.copy_(part, non_blocking=True)
            if self._device.type == "cuda":
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
        finally:
            self._staging.put((buffer, copied))


def _fill(fd: int, begin: int, target: torch.Tensor) -> None:
    """Reads into host memory until it is full."""
    left = memoryview(target.numpy().data)
    while left:
        count = os.preadv(fd, [left], begin)
        if not count:
            raise EOFError(f"the file ends {len(left)} bytes too early")
        left, begin = left[count:], begin + count


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
