"""The directory of files and batches on disk, and the writes that survive a kill and a power cut.

    DIR/lock              held by the server that uses the directory
    DIR/files/ID.json     a file's record; DIR/files/ID.content its bytes, which are there before the record
    DIR/batches/ID.json   a batch's record; ID.lines where the lines of its input are, once they are checked

Both folders have mode 0700, all files 0600. A record is replaced as a whole. The results of a batch are the bytes of
the two files that it will have: lines are appended and fsynced, and the records follow at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from plait.host.private_file import PRIVATE_MODE, open_private, open_regular
from plait.runtime.errors import InputError
from plait.runtime.results.result_file import PART_SUFFIX, replacing

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

FOLDER_MODE = 0o700
INDEX_SUFFIX = ".lines"


class StateDirectory:
    """The directory that the operator named, locked until `close()`. Raises InputError if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            _check_is_private(path)
            self._lock = _lock(path)
            self.files, self.batches = _private_folder(path / "files"), _private_folder(path / "batches")
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from None

    def close(self) -> None:
        """Lets another server use the directory."""
        os.close(self._lock)


def _unusable(path: Path, reason: str) -> InputError:
    return InputError(f"--files-dir {str(path)!r} cannot be used: {reason}")


def _check_is_private(path: Path) -> None:
    """Raises InputError if another account could replace the folders in `path`."""
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise _unusable(path, "every account can write to it; chmod o-w it, or name another directory")


def _lock(path: Path) -> int:
    lock = open_regular(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise _unusable(path, "another server uses it; give each server its own directory") from None
    return lock


def _private_folder(path: Path) -> Path:
    """Makes a folder that only this account can enter. Raises InputError for a link, or one of another account."""
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise _unusable(path, "it is no folder of this account")
    path.chmod(FOLDER_MODE)
    return path


def disk_problem(error: OSError) -> tuple[str, str]:
    """Returns the code and the text of what the disk refuses, without a path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full", "the server's disk is full"
    return "storage_error", f"the server cannot store this: {error.strerror or type(error).__name__}"


# -- records --------------------------------------------------------------------------------------


def encode_record(record: msgspec.Struct) -> bytes:
    """Returns a record as it is stored."""
    return msgspec.json.format(msgspec.json.encode(record))


def write_record(path: Path, encoded: bytes) -> None:
    """Replaces a record: after a crash at any moment the old one or the new one is there. Raises OSError."""
    with replacing(path, PRIVATE_MODE) as file:
        file.write(encoded)


def read_records(folder: Path, kind: type[T]) -> list[T]:
    """Reads all records of a folder. Raises InputError that names a damaged one."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = msgspec.json.decode(read_stored(path), type=kind)
            reason = "" if getattr(record, "id", None) == path.stem else "its id is not that of its name"
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            reason = str(error)
        if reason:
            text = f"the state file {str(path)!r} is damaged ({reason}); restore it, or move it out of the directory"
            raise InputError(text)
        records.append(record)
    return records


# -- files ----------------------------------------------------------------------------------------


def open_new(path: Path) -> int:
    """Opens an empty file for writing, with mode 0600. Raises OSError."""
    return open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def open_stored(path: Path) -> int:
    """Opens a file for reading. Raises OSError, at once, for a link, a FIFO or a device in its place."""
    return open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)


def read_stored(path: Path) -> bytes:
    """Returns the bytes of a file. Raises OSError as `open_stored`."""
    with os.fdopen(open_stored(path), "rb") as file:
        return file.read()


async def run_to_end(function: Callable[..., R], *arguments: Any) -> R:
    """Returns the value of a function that runs in a thread, and waits for its end also if this task is cancelled.

    For functions with a descriptor that the caller closes: its number may soon be that of another file.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        task.exception()  # retrieved, also where the cancellation is raised instead


def remove_unfinished(folder: Path, running: Collection[str]) -> None:
    """Removes records whose writing a kill interrupted, and indexes of batches other than `running`. Raises OSError."""
    for path in folder.iterdir():
        if path.suffix == PART_SUFFIX or (path.suffix == INDEX_SUFFIX and path.stem not in running):
            remove(path)


def remove(path: Path) -> None:
    """Removes a file, if it is there. Raises OSError."""
    path.unlink(missing_ok=True)
