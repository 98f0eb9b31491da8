"""Parts of matrices in files, as bytes: where they are, and reading them into host memory without mapping the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.runtime.errors import CorruptModel
from plait.runtime.models.checkpoint_interface import Range

Piece = tuple[int, int]  # offset in the file, number of bytes


class StoredRows(NamedTuple):
    """Ranges of the rows of a matrix of bytes in a file, and of each row the bytes `columns`."""

    path: Path
    begin: int  # of row 0, in the file
    row_bytes: int  # of a complete row
    rows: tuple[Range, ...]
    columns: Range

    @classmethod
    def one_row(cls, path: Path, begin: int, num_bytes: int) -> StoredRows:
        """All bytes of a tensor as one row."""
        return cls(path, begin, num_bytes, ((0, 1),), (0, num_bytes))

    @property
    def num_rows(self) -> int:
        return sum(end - first for first, end in self.rows)

    @property
    def width(self) -> int:
        """The bytes of each row that are read."""
        return self.columns[1] - self.columns[0]

    def pieces(self) -> Iterator[Piece]:
        """The contiguous parts of the file, in the order of the rows."""
        for first, end in self.rows:
            if self.width == self.row_bytes:
                yield self.begin + first * self.row_bytes, (end - first) * self.row_bytes
                continue
            for row in range(first, end):
                yield self.begin + row * self.row_bytes + self.columns[0], self.width


def split_pieces(pieces: Iterator[Piece], chunk_bytes: int) -> Iterator[list[Piece]]:
    """The pieces, cut and grouped into chunks of `chunk_bytes`; the last one may have fewer."""
    chunk: list[Piece] = []
    room = chunk_bytes
    for begin, count in pieces:
        while count:
            taken = min(count, room)
            chunk.append((begin, taken))
            begin, count, room = begin + taken, count - taken, room - taken
            if not room:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


def read_pieces(fd: int, path: Path, pieces: Sequence[Piece], target: memoryview) -> None:
    """Fills `target` with the pieces, one after the other. Raises CorruptModel if the file is shorter."""
    filled = 0
    for begin, count in pieces:
        end = filled + count
        while filled < end:
            got = os.preadv(fd, [target[filled:end]], begin)
            if not got:
                raise CorruptModel(f"{path.name} is truncated or damaged; download it again")
            filled, begin = filled + got, begin + got


def read_rows(stored: StoredRows) -> npt.NDArray[np.uint8]:
    """The rows in new memory, uint8 [rows, width], read by the calling thread. Raises CorruptModel or OSError."""
    rows = np.empty((stored.num_rows, stored.width), np.uint8)
    if rows.size:
        with opened(stored.path) as fd:
            read_pieces(fd, stored.path, list(stored.pieces()), rows.reshape(-1).data)
    return rows


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor for reading; closed at the end."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
