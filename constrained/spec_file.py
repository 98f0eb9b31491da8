"""A file of the constraints that were used last, so that a runtime compiles them again after a restart.

It has the constraints themselves, not what they compile to: that is larger, depends on the versions of libraries, and
is trusted by the scheduler. The file is a checksum and MessagePack of typed structs, is replaced as a whole, and is
ignored if it is damaged or could have been written by another user. A file of another kind is not replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock, Thread
from time import monotonic

import msgspec

from plait.constrained.specs import Spec
from plait.host.private_file import open_private, open_regular

MAX_BYTES = 4 << 20
MAX_SPECS = 1024
_MAGIC = b"plait constraints 1\n"
_DIGEST_BYTES = 32
WRITE_SPECS_S = 10.0  # between two writes of a RecentSpecs
_logger = logging.getLogger("plait.constrained")


class SpecFile:
    """The file at `path`, of at most 4 MiB and 1,024 constraints. Its errors are logged and never raised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()  # of writing
        self._digest = b""  # of what was read or written last

    def read(self) -> list[Spec]:
        """Returns the constraints, the most recently used first; none if the file is missing, damaged or not private.

        >>> SpecFile(Path("/nowhere/constraints")).read()                     # doctest: +SKIP
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
        with open(open_private(self.path), "rb") as file:
            content = file.read(MAX_BYTES + 1)
        head, body = content[: len(_MAGIC) + _DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
        digest = hashlib.sha256(body).digest()
        if len(content) > MAX_BYTES or head != _MAGIC + digest:
            raise ValueError("it is damaged")
        self._digest = digest
        return body

    def _replace(self, content: bytes) -> None:
        """Raises OSError, also for a file that is no file of constraints: its path was given by mistake."""
        with contextlib.suppress(FileNotFoundError), open(open_regular(self.path), "rb") as file:
            if not _MAGIC.startswith(file.read(len(_MAGIC))):
                raise FileExistsError(errno.EEXIST, "it is not a file of constraints, and stays as it is")
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


class RecentSpecs:
    """The specs that `used` returns, the most recently used first, and those of the last start that are not compiled
    again yet. Without a file it has none.

    >>> kept = RecentSpecs(spec_file, cache.grammars.specs)                  # doctest: +SKIP
    >>> kept.read()                                                       # doctest: +SKIP
    >>> kept.next_to_warm_up()                                            # doctest: +SKIP
    Regex(pattern='[0-9]+')
    """

    def __init__(self, spec_file: SpecFile | None, used: Callable[[], list[Spec]]) -> None:
        self._file, self._used = spec_file, used
        self._to_warm_up: list[Spec] = []  # the next one is the last
        self._writes_from = monotonic() + WRITE_SPECS_S  # nothing is written before this time

    def read(self) -> None:
        """Reads the specs to restore."""
        if self._file is not None:
            self._to_warm_up = self._file.read()[::-1]

    @property
    def needs_warmup(self) -> bool:
        """Whether `next_to_warm_up` has a spec."""
        return bool(self._to_warm_up)

    def next_to_warm_up(self) -> Spec:
        """Removes and returns the most recently used spec that is not restored yet."""
        return self._to_warm_up.pop()

    def write(self) -> None:
        """Writes the specs, the most recently used first."""
        if self._file is not None:
            self._file.write(self._specs())

    def write_soon(self) -> None:
        """Writes the specs in a thread, now and then, so that they outlive a process that is killed."""
        now = monotonic()
        if self._file is not None and not self._to_warm_up and now >= self._writes_from:
            self._writes_from = now + WRITE_SPECS_S
            Thread(target=self._file.write, args=(self._specs(),), daemon=True, name="plait-constraints").start()

    def _specs(self) -> list[Spec]:
        return list(dict.fromkeys([*self._used(), *reversed(self._to_warm_up)]))
