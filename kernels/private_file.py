"""Opens the files of a cache: regular files of this user, without waiting for what lies there in their place."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OPENED_AS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would be waited for
_NOT_REGULAR = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # links, folders, FIFOs and sockets


class OddFile(OSError):
    """What has the name of a cached file is no regular file, belongs to another user, or others may write to it."""

    def __init__(self) -> None:
        super().__init__(errno.EPERM, "it is no regular file, belongs to another user, or others may write to it")


def is_private(status: os.stat_result) -> bool:
    """Returns whether a file or folder belongs to this user, and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def open_private(path: Path | str, flags: int = os.O_RDONLY, folder_fd: int | None = None) -> int:
    """Opens a file of a cache and returns its descriptor. `path` is relative to the folder `folder_fd`, if it is given.

    Returns at once and follows no link, whatever lies there. Raises OddFile, FileNotFoundError and other OSErrors. With
    os.O_CREAT, what would be an OddFile is removed, unless it is a folder, and the file is made, with mode 0600.

    >>> os.close(open_private("/tmp/example", os.O_RDWR | os.O_CREAT))   # doctest: +SKIP
    """
    try:
        return _opened(path, flags, folder_fd)
    except OddFile:
        if not flags & os.O_CREAT:
            raise
        os.unlink(path, dir_fd=folder_fd)
        return _opened(path, flags, folder_fd)


def _opened(path: Path | str, flags: int, folder_fd: int | None) -> int:
    try:
        fd = os.open(path, flags | _OPENED_AS, 0o600, dir_fd=folder_fd)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise OddFile from error
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or not is_private(status):
        os.close(fd)
        raise OddFile
    return fd
