"""A file of byte arrays with JSON metadata, which is mapped into memory, and whose damage is found.

Layout, little-endian: magic, five integers (`_PREAMBLE`), metadata, a table of checksums, and the arrays. These begin
at a multiple of 2 MiB if they are large, the others behind the first at multiples of 16 KiB, and are padded with zeros.
So Linux keeps them in pages of 2 MiB, from which weights are read faster than from those of 4 KiB. A
CRC-32 covers everything before the arrays. The table has a checksum of every 1 MiB of the arrays, which depends on the
place of each word and is computed nearly as fast as memory is read: the 64-bit words are a matrix, of whose row sums
and column sums modulo 2^64 it holds the CRC-32. So a block whose sums are unaltered has at least four altered words, in
two rows and two columns, whose differences cancel out.
"""

from __future__ import annotations

import contextlib
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
RunJobs = Callable[[Callable[[Any], None], Sequence[Any]], None]  # runs a function of each job, maybe in threads

MAGIC = b"plaitar2"
CHUNK = 1 << 14
BLOCK = 1 << 20  # bytes with one checksum; the last block may be smaller
HUGE_PAGE = 1 << 21
_LARGE = 1 << 24  # bytes of arrays, at least, that begin at a multiple of HUGE_PAGE
_PREAMBLE = struct.Struct("<8sQQQQQ")  # magic, CRC-32, bytes of metadata, number of blocks, start of arrays, file size
_CHECKED_FROM = 16  # bytes before: the magic and the CRC-32 itself
_ROW_BYTES = 4096  # of the matrix of a block
_PART_BLOCKS = 16  # whose checksums a thread computes at a time
_MAX_METADATA = 1 << 26


class DamagedFile(Exception):
    """The file is not one of this layout, is truncated, or was altered."""


@dataclass(frozen=True)
class ArrayFile:
    """A mapped file whose header is intact. `data`: the arrays' bytes, read-only; `checksums`: of their blocks."""

    metadata: bytes
    data: Bytes
    checksums: Sequence[int]

    def check(self, run: RunJobs) -> None:
        """Reads all arrays, which also maps their pages. Raises DamagedFile if they are not as they were written."""
        damaged: list[int] = []

        def check_part(first: int) -> None:
            for index, checksum in enumerate(self.checksums[first : first + _PART_BLOCKS], first):
                if _checksum(self.data[index * BLOCK : (index + 1) * BLOCK]) != checksum:
                    damaged.append(index)

        run(check_part, range(0, len(self.checksums), _PART_BLOCKS))
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

    before_part: called before each 2 MiB are written; an exception that it raises ends the writing.
    """
    num_bytes = array_starts([array.nbytes for array in arrays])[-1]
    begin = _data_start(len(metadata), num_bytes)
    os.lseek(fd, begin, os.SEEK_SET)
    checksums = []
    for part in _parts(arrays):
        before_part()
        checksums += [_checksum(part[first : first + BLOCK]) for first in range(0, len(part), BLOCK)]
        _write(fd, part.data)
    rest = _PREAMBLE.pack(MAGIC, 0, len(metadata), len(checksums), begin, begin + num_bytes)[_CHECKED_FROM:]
    rest += metadata + struct.pack(f"<{len(checksums)}Q", *checksums)
    os.lseek(fd, 0, os.SEEK_SET)
    _write(fd, memoryview(MAGIC + zlib.crc32(rest).to_bytes(8, "little") + rest.ljust(begin - _CHECKED_FROM, b"\0")))


def file_bytes(metadata: bytes, sizes: Sequence[int]) -> int:
    """Returns the size of the file that `write_arrays` would write for arrays of these sizes."""
    end = array_starts(sizes)[-1]
    return _data_start(len(metadata), end) + end


def map_arrays(fd: int) -> ArrayFile:
    """Maps a file. Raises DamagedFile unless its header is intact and its size is right, and OSError."""
    size = os.fstat(fd).st_size
    if size < _PREAMBLE.size:
        raise DamagedFile("it is truncated")
    memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # what is not in the page cache is read into them
    mapped = np.frombuffer(memory, np.uint8)
    magic, checksum, metadata_bytes, num_blocks, begin, expected = _PREAMBLE.unpack(mapped[: _PREAMBLE.size].tobytes())
    if magic != MAGIC or expected != size or metadata_bytes > _MAX_METADATA:
        raise DamagedFile("it is truncated or not a file of arrays")
    num_bytes = size - begin
    if num_bytes < 0 or num_bytes % CHUNK or num_blocks != _num_blocks(num_bytes):
        raise DamagedFile("its header was altered")
    table = _PREAMBLE.size + metadata_bytes
    table_end = table + 8 * num_blocks
    if begin != _data_start(metadata_bytes, num_bytes) or zlib.crc32(mapped[_CHECKED_FROM:table_end].data) != checksum:
        raise DamagedFile("its header was altered")
    checksums = struct.unpack(f"<{num_blocks}Q", mapped[table:table_end].data)
    return ArrayFile(mapped[_PREAMBLE.size : table].tobytes(), mapped[begin:], checksums)


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK)


def _data_start(metadata_bytes: int, num_bytes: int) -> int:
    multiple = HUGE_PAGE if num_bytes >= _LARGE else CHUNK
    return -(-(_PREAMBLE.size + metadata_bytes + 8 * _num_blocks(num_bytes)) // multiple) * multiple


def _parts(arrays: Sequence[Bytes]) -> Iterator[Bytes]:
    """Yields padded arrays in parts of HUGE_PAGE bytes, each valid until the next one."""
    part, filled = np.zeros(HUGE_PAGE, np.uint8), 0
    for array in arrays:
        rest = np.ascontiguousarray(array).reshape(-1)
        while len(rest):
            taken = min(len(rest), HUGE_PAGE - filled)
            part[filled : filled + taken] = rest[:taken]
            rest, filled = rest[taken:], filled + taken
            if filled < HUGE_PAGE and not len(rest):
                padding = -filled % CHUNK
                part[filled : filled + padding] = 0
                filled += padding
            if filled == HUGE_PAGE:
                yield part
                filled = 0
    if filled:
        yield part[:filled]


def _checksum(block: Bytes) -> int:
    """Returns the CRC-32 of the row sums of a block's words, and above it that of their column sums."""
    words = block.view("<u8").reshape(-1, _ROW_BYTES // 8)
    rows, columns = np.add.reduce(words, axis=1), np.add.reduce(words, axis=0)
    return zlib.crc32(rows.astype("<u8").data) | zlib.crc32(columns.astype("<u8").data) << 32


def _write(fd: int, content: memoryview) -> None:
    while len(content):
        content = content[os.write(fd, content) :]
