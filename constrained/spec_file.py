"""A file of the constraints that were used last, so that a runtime compiles them again after a restart.

It has the constraints themselves, not what they compile to: that is larger, depends on the versions of libraries, and
is trusted by the scheduler. The file is a checksum and MessagePack of typed structs, is replaced as a whole, and is
ignored if it is damaged or could have been written by another user.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

import msgspec

from plait.constrained.specs import Spec

MAX_BYTES = 4 << 20
MAX_SPECS = 1024
_MAGIC = b"plait constraints 1\n"
_DIGEST_BYTES = 32
_logger = logging.getLogger("plait.constrained")


class SpecFile:
    """The file at `path`, of at most 4 MiB and 1,024 constraints. Its errors are logged and never raised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()  # of writing
        self._digest = b""  # of what was read or written last

    def read(self) -> list[Spec]:
        """Returns the constraints, the most recently used first; none if the file is missing, damaged or not private.

        >>> SpecFile(Path("/nowhere/constraints")).read()
        []
        """
        try:
            body = self._read_checked()
            return msgspec.msgpack.decode(body, type=list[Spec])[:MAX_SPECS] if body else []
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            _logger.warning("constraints of the last start are not used: %s: %.200s", self.path, error)
            return []

    def write(self, specs: Iterable[Spec]) -> None:
        """Replaces the file by the first of `specs` that fit; they come most recently used first."""
        kept, size = list[Spec](), 0
        for spec in specs:
            size += len(msgspec.msgpack.encode(spec))
            if size > MAX_BYTES - 1024 or len(kept) == MAX_SPECS:
                break
            kept.append(spec)
        body = msgspec.msgpack.encode(kept)
        with self._lock:
            if (digest := hashlib.sha256(body).digest()) == self._digest:
                return
            try:
                self._replace(_MAGIC + digest + body)
                self._digest = digest
            except OSError as error:
                _logger.warning("constraints are not kept for the next start: %s: %.200s", self.path, error)

    def _read_checked(self) -> bytes:
        with open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise ValueError("it is no file of this user's, or others may write to it")
            content = file.read(MAX_BYTES + 1)
        head, body = content[: len(_MAGIC) + _DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
        digest = hashlib.sha256(body).digest()
        if len(content) > MAX_BYTES or head != _MAGIC + digest:
            raise ValueError("it is damaged")
        self._digest = digest
        return body

    def _replace(self, content: bytes) -> None:
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            os.replace(part, self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
