"""A kill of this process before the n-th change of the disk, or in the middle of it."""

from __future__ import annotations

import os


class Killed(BaseException):
    """The process has ended."""


class KilledOs:
    """The module `os`, whose changes of the disk end with the n-th one."""

    def __init__(self, num_left: int) -> None:
        self.num_left, self.num_done = num_left, 0

    def __getattr__(self, name):
        return getattr(os, name)

    def _count(self) -> bool:
        """Whether this operation is the one in whose middle the kill comes. Raises Killed behind it."""
        self.num_left -= 1
        if self.num_left < 0:
            raise Killed
        self.num_done += 1
        return self.num_left == 0

    def write(self, descriptor, data):
        if self._count():
            os.write(descriptor, bytes(data[: len(data) // 2]))
            raise Killed
        return os.write(descriptor, data)

    def fsync(self, descriptor):
        self._count()
        os.fsync(descriptor)

    def replace(self, source, target):
        self._count()
        os.replace(source, target)

    def ftruncate(self, descriptor, size):
        self._count()
        os.ftruncate(descriptor, size)
