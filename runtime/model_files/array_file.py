"""A file of byte arrays with JSON metadata, which is mapped into memory, and whose damage is found.

Layout, little-endian: magic, five integers (`_PREAMBLE`), metadata, a table of sums, and the arrays, which begin at
multiples of 16 KiB and are padded with zeros. The checksum covers everything before the arrays. The table has the sum
of the 64-bit words of every 16 KiB of the arrays, modulo 2^64: any altered byte changes it, and it is computed as fast
as memory is read.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]
RunJobs = Callable[[Callable[[Any], None], Sequence[Any]], None]  # runs a function of each job, maybe in threads

MAGIC = b"plaitarr"
CHUNK = 1 << 14
_PREAMBLE = struct.Struct("<8sQQQQQ")  # magic, checksum, bytes of metadata, number of sums, start of arrays, file size
_CHECKED_FROM = 16  # bytes before: the magic and the checksum itself
_CHECK_BYTES = 1 << 24  # bytes whose sums a thread computes at a time
_MAX_METADATA = 1 << 26
_PART_BYTES = 1 << 24  # a multiple of CHUNK


class DamagedFile(Exception):
    """The file is not one of this layout, is truncated, or was altered."""


@dataclass(frozen=True)
class ArrayFile:
    """A mapped file whose header is intact. `data`: the arrays' bytes, read-only; `sums`: their table."""

    metadata: bytes
    data: Bytes
    sums: Sums

    def check(self, run: RunJobs) -> None:
        """Reads all arrays, which also maps their pages. Raises DamagedFile if they are not as they were written."""
        step = _CHECK_BYTES // CHUNK
        damaged: list[int] = []

        def check_part(first: int) -> None:
            words = self.data[first * CHUNK : (first + step) * CHUNK].view("<u8").reshape(-1, CHUNK // 8)
            if not np.array_equal(np.add.reduce(words, axis=1), self.sums[first : first + step]):
                damaged.append(first)

        run(check_part, range(0, len(self.sums), step))
        if damaged:
            raise DamagedFile("its contents were altered")


def array_starts(sizes: Sequence[int]) -> list[int]:
    """Returns where arrays of these sizes (bytes) begin in `ArrayFile.data`, and after the last one its end."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // CHUNK) * CHUNK)
    return starts


def write_arrays(
    fd: int, metadata: bytes, arrays: Sequence[Bytes], before_part: Callable[[], None] = lambda: None
) -> None:
    """Writes a complete file into the empty file `fd`. Raises OSError.

    before_part: called before each 16 MiB are summed or written; an exception that it raises ends the writing.
    """
    views = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    parts = [view[start : start + _PART_BYTES] for view in views for start in range(0, len(view), _PART_BYTES)]
    sums_of_parts = [np.empty(0, np.uint64)]
    for part in parts:
        before_part()
        sums_of_parts.append(_sums(part))
    sums = np.concatenate(sums_of_parts)
    begin = _data_start(len(metadata), len(sums))
    rest = _PREAMBLE.pack(MAGIC, 0, len(metadata), len(sums), begin, begin + CHUNK * len(sums))[_CHECKED_FROM:]
    head = rest + metadata + sums.astype("<u8").tobytes()
    head = MAGIC + zlib.crc32(head).to_bytes(8, "little") + head
    _write(fd, memoryview(head.ljust(begin, b"\0")))
    for part in parts:
        before_part()
        _write(fd, part.data)
        _write(fd, memoryview(bytes(-len(part) % CHUNK)))


def file_bytes(metadata: bytes, sizes: Sequence[int]) -> int:
    """Returns the size of the file that `write_arrays` would write for arrays of these sizes."""
    end = array_starts(sizes)[-1]
    return _data_start(len(metadata), end // CHUNK) + end


def map_arrays(fd: int) -> ArrayFile:
    """Maps a file. Raises DamagedFile unless its header is intact and its size is right, and OSError."""
    size = os.fstat(fd).st_size
    if size < _PREAMBLE.size:
        raise DamagedFile("it is truncated")
    mapped = np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), np.uint8)
    magic, checksum, metadata_bytes, num_sums, begin, expected = _PREAMBLE.unpack(mapped[: _PREAMBLE.size].tobytes())
    if magic != MAGIC or expected != size or metadata_bytes > _MAX_METADATA:
        raise DamagedFile("it is truncated or not a file of arrays")
    if begin != _data_start(metadata_bytes, num_sums) or begin + CHUNK * num_sums != size:
        raise DamagedFile("its header was altered")
    table = _PREAMBLE.size + metadata_bytes
    if zlib.crc32(mapped[_CHECKED_FROM : table + 8 * num_sums].data) != checksum:
        raise DamagedFile("its header was altered")
    sums = np.frombuffer(mapped[table : table + 8 * num_sums].tobytes(), "<u8")
    return ArrayFile(mapped[_PREAMBLE.size : table].tobytes(), mapped[begin:], sums)


def _data_start(metadata_bytes: int, num_sums: int) -> int:
    return -(-(_PREAMBLE.size + metadata_bytes + 8 * num_sums) // CHUNK) * CHUNK


def _sums(array: Bytes) -> Sums:
    """Returns the sums of an array's chunks; the last one is padded with zeros."""
    full = len(array) // CHUNK * CHUNK
    last = np.zeros(CHUNK if full < len(array) else 0, np.uint8)
    last[: len(array) - full] = array[full:]
    parts: Iterator[Bytes] = iter((array[:full], last))
    sums: Sums = np.concatenate([np.add.reduce(x.view("<u8").reshape(-1, CHUNK // 8), axis=1) for x in parts])
    return sums


def _write(fd: int, content: memoryview) -> None:
    while len(content):
        content = content[os.write(fd, content) :]
