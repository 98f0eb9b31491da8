"""Reads parts of files into tensors by several threads: into host memory directly, to a GPU through pinned buffers.

file ─ pread, one thread each ─▶ pinned buffer ─ copied by the GPU meanwhile ─▶ the tensor's place
"""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.runtime.weights.stored_rows import Piece, StoredRows, opened, read_pieces, split_pieces

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
        self._is_staged = False
        if device.type == "cuda":
            self.add_staging(2 * num_threads, is_pinned=True)

    def add_staging(self, count: int, is_pinned: bool) -> None:
        """Allocates `count` buffers; with any, every chunk is copied through one."""
        import torch

        for _ in range(count):
            self._staging.put((torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=is_pinned), None))
        self._is_staged = True

    def read(self, parts: Sequence[StoredRows], target: torch.Tensor) -> None:
        """Fills the contiguous `target` with the bytes of the parts, one after the other.

        On a GPU the last copies may still run: work on the current stream follows them. The first error of any thread
        ends the reading: CorruptModel for a file that is shorter, OSError for one that cannot be read. No thread uses
        the target or the files afterwards.
        """
        import torch

        flat = target.view(-1).view(torch.uint8)
        if len(flat) != sum(part.num_rows * part.width for part in parts):
            raise ValueError(f"a target of {len(flat)} bytes does not fit the parts that are read into it")
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        jobs: list[Future[None]] = []
        with ExitStack() as files:
            try:
                filled = 0
                for part in parts:
                    fd = files.enter_context(opened(part.path))
                    for chunk in split_pieces(part.pieces(), self._chunk_bytes):
                        end = filled + sum(count for _, count in chunk)
                        place = flat[filled:end]
                        jobs.append(self._pool.submit(self._read_chunk, fd, part.path, chunk, place, stream))
                        filled = end
                wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                for job in jobs:
                    job.cancel()
                wait(jobs)  # before the files are closed
        for job in jobs:
            if not job.cancelled():
                job.result()

    def read_new(self, parts: Sequence[StoredRows]) -> torch.Tensor:
        """The parts, which are equally wide, in new memory of the device: uint8 [rows, width]. Raises as `read`."""
        import torch

        shape = (sum(part.num_rows for part in parts), parts[0].width)
        is_filled_in_place = self._device.type in ("cpu", "cuda")
        target = torch.empty(shape, dtype=torch.uint8, device=self._device if is_filled_in_place else "cpu")
        self.read(parts, target)
        return target.to(self._device)

    def close(self) -> None:
        self._pool.shutdown()

    def _read_chunk(self, fd: int, path: Path, pieces: Sequence[Piece], target: torch.Tensor, stream: Any) -> None:
        if not self._is_staged:
            read_pieces(fd, path, pieces, target.numpy().data)
            return
        import torch

        buffer, copied = self._staging.get()
        try:
            if copied is not None:
                copied.synchronize()
            part = buffer[: len(target)]
            read_pieces(fd, path, pieces, part.numpy().data)
            with torch.cuda.stream(stream):  # does nothing for None
                target.copy_(part, non_blocking=True)
                copied = stream.record_event() if stream is not None else None
        finally:
            self._staging.put((buffer, copied))


class Readers:
    """The readers of a checkpoint, one for each device, made when they are asked for."""

    def __init__(self) -> None:
        self._readers: dict[torch.device, ParallelReader] = {}

    def of(self, device: torch.device | str) -> ParallelReader:
        import torch

        device = torch.device(device)
        if device not in self._readers:
            self._readers[device] = ParallelReader(device)
        return self._readers[device]

    def close(self) -> None:
        """Ends the threads of all readers. Their buffers return to torch's allocator, which keeps pinned memory."""
        while self._readers:
            self._readers.popitem()[1].close()
