"""The result files of `plait batch`, of `run_batch(resume=)` and of a server's batches: one line, one result.

    {"index": 0, ...}\\n      a line counts once it has its end
    {"index": 1, ...}\\n
    {"index": 2, "inp         what a kill leaves of the last one: cut off, and computed again

What a file is a result of stands beside it (`OUT.plait`, the record of a server's batch) or in each line (the keys of
`resume=`). A file is read as a whole before it is touched. One with a line that its reader does not know is another
program's, or damaged: it is refused, and stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from plait.host.private_file import PRIVATE_MODE, PUBLIC_MODE, open_regular

MARKED_BYTES = 1000  # of a file, in which its mark is
PART_SUFFIX = ".part"  # of a file that has not taken its place


class NotAResult(ValueError):
    """A line of a file is no result of it, for this reason. `number`: of the line, from 1."""

    def __init__(self, path: Path, number: int, reason: str) -> None:
        super().__init__(f"{path}, line {number}, {reason}")
        self.number, self.reason = number, reason


class ResultFile:
    """A file to which results are appended, from any thread.

    Opening it reads the lines that are there: `take(line)` gets each one, without its end, and raises ValueError for
    one that is no result. `start` is what every line begins with. Nothing is written before `begin` or `append`.

    is_durable: for results that must survive a power cut: lines are fsynced. Such a file is private, and no link.
    Raises NotAResult, and OSError.
    """

    def __init__(self, path: Path, take: Callable[[bytes], None], start: bytes, *, is_durable: bool = False) -> None:
        self.path, self._start, self._is_durable = path, start, is_durable
        self.size = 0  # bytes of complete lines
        self._missing_end = b""  # of the last line
        self._cut_at: int | None = None  # the size behind which a part of a line follows
        self._place: tuple[int, int] | None = None  # device and inode
        self._lock = threading.Lock()
        try:
            descriptor = self._open(os.O_RDONLY)
        except FileNotFoundError:
            return
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            self._place = info.st_dev, info.st_ino
            self._read(file, take)

    def _read(self, file: Iterable[bytes], take: Callable[[bytes], None]) -> None:
        for number, line in enumerate(file, 1):
            has_end = line.endswith(b"\n")
            if not has_end and self._is_cut_off(line):
                self._cut_at = self.size
                return
            try:
                take(line.removesuffix(b"\n"))
            except ValueError as error:
                raise NotAResult(self.path, number, str(error)) from None
            self.size += len(line)
            self._missing_end = b"" if has_end else b"\n"

    def _is_cut_off(self, line: bytes) -> bool:
        """Whether it is the beginning of a line of such a file."""
        if line[: len(self._start)] != self._start[: len(line)]:
            return False
        try:
            json.loads(line)
        except RecursionError:
            return False
        except ValueError:
            return True
        return False

    def begin(self) -> None:
        """Makes the file ready: creates it, and cuts off the part of a last line. Raises OSError."""
        self.append(b"")

    def append(self, lines: bytes) -> None:
        """Appends lines with their ends: all of them, or none if it raises OSError."""
        with self._lock:
            descriptor = self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                self._check_unchanged(descriptor)
                if self._cut_at is not None:
                    os.ftruncate(descriptor, self._cut_at)
                if data := self._missing_end + lines:
                    self._write(descriptor, data)
                self._cut_at, self._missing_end = None, b""
            finally:
                os.close(descriptor)

    def _write(self, descriptor: int, data: bytes) -> None:
        size = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, data)
            if self._is_durable:
                os.fsync(descriptor)
                if not size:
                    sync_folder(self.path.parent)
        except OSError:
            self._cut_at = size  # by the next append, if it fails here
            os.ftruncate(descriptor, size)
            self._cut_at = None
            raise
        self.size += len(data)

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replaces all lines, such as by the same ones in order: after a kill the old or the new ones are there.

        Raises OSError.
        """
        descriptor = self._open(os.O_RDONLY)
        try:
            self._check_unchanged(descriptor)
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
        with replacing(self.path) as file:
            os.fchmod(file.fileno(), mode)
            file.writelines(lines)
            file.flush()
            info = os.fstat(file.fileno())
        self.size, self._place = info.st_size, (info.st_dev, info.st_ino)

    def remove(self) -> None:
        """Removes the file, if it is there. Raises OSError."""
        self.path.unlink(missing_ok=True)
        self.size, self._place = 0, None

    def _check_unchanged(self, descriptor: int) -> None:
        """Raises OSError unless this is the file that was read, or an empty one."""
        info = os.fstat(descriptor)
        place = info.st_dev, info.st_ino
        if not info.st_size:
            self._place, self.size, self._cut_at, self._missing_end = place, 0, None, b""
        elif place != self._place or info.st_size < self.size:  # a new file may get the inode of an old one
            raise OSError(errno.ESTALE, "another program has replaced the file", str(self.path))

    def _open(self, flags: int) -> int:
        if self._is_durable:
            return open_regular(self.path, flags | os.O_NOFOLLOW, PRIVATE_MODE)
        return open_regular(self.path, flags)


def read_written(path: Path) -> bytes:
    """Returns the bytes of a small file that stands beside results. Raises OSError, at once, for a FIFO and such."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def may_replace(path: Path, *marks: bytes) -> bool:
    """Whether there is no such file, or one that is empty or was written by plait, so that its begin has a mark."""
    if not path.exists():
        return True
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            begin = file.read(MARKED_BYTES)
    except OSError:
        return False
    return not begin or any(mark in begin for mark in marks)


@contextlib.contextmanager
def replacing(path: Path, mode: int = PUBLIC_MODE) -> Iterator[BinaryIO]:
    """Yields a new file that takes the place of `path` at the end of the block, durably.

    After a kill the old file or the new one is there. A link stays, and leads to the new file. Raises OSError.
    """
    target = path.resolve()
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        sync_folder(target.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`. Raises OSError, such as ENOSPC, after a part of it may have been written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
