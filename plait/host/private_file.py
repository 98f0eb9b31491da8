"""Opens files that plait wrote, without waiting for what lies there in their place: a FIFO, a device, a link.

`open_regular` is for files beside the user's own, `open_private` for those of caches and of the server's state.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

PRIVATE_MODE, PUBLIC_MODE = 0o600, 0o666
_NOT_REGULAR = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # links, folders, FIFOs and sockets


class OddFile(OSError):
    """What has the name of a file is no regular file; of a private one, it belongs to another user, or others may
    write to it."""

    def __init__(self, text: str = "it is no regular file, belongs to another user, or others may write to it") -> None:
        super().__init__(errno.EPERM, text)


def is_private(status: os.stat_result) -> bool:
    """Returns whether a file or folder belongs to this user, and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def open_regular(
    path: Path | str, flags: int = os.O_RDONLY, mode: int = PUBLIC_MODE, folder_fd: int | None = None
) -> int:
    """Opens a regular file at once and returns its descriptor. Follows links, except with os.O_NOFOLLOW.

    Raises OddFile for anything else, and OSErrors.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder_fd)  # a FIFO would be waited for
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise OddFile("it is no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OddFile("it is no regular file")
    return fd


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
    fd = open_regular(path, flags | os.O_NOFOLLOW, PRIVATE_MODE, folder_fd)
    if not is_private(os.fstat(fd)):
        os.close(fd)
        raise OddFile
    return fd
