"""The folder of packed weights: one file for a model and a weight format, bounded in total size.

It also has the merges of large tokenizers (`tokenizer.sentencepiece_merges`), which belong to no model.

The folder is `plait/packed-weights` in the user's cache. PLAIT_PACKED_CACHE_GB is the size that its files may have
together, in 10^9 bytes (default 16; 0: nothing is read or written). The files used least recently go first, and those
whose model has changed. Any number of processes may use the folder at the same time: a file gets its name when it is
complete, and one that is removed stays readable for those that have mapped it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from plait.host.private_file import OddFile, is_private, open_private
from plait.host.user_folders import cache_folder
from plait.runtime.model_files.array_file import ArrayFile, Bytes, DamagedFile, file_bytes, map_arrays, write_arrays

LIMIT_VARIABLE = "PLAIT_PACKED_CACHE_GB"
DEFAULT_LIMIT_GB = 16.0
MIN_BYTES = 16 << 20  # smaller models are packed as fast as they are found
FREE_BYTES = 1 << 30  # of the disk that stay free
SAMPLES, SAMPLE_BYTES = 512, 4096  # of a model's file, for its identity
_SUFFIX, _PART_SUFFIX = ".weights", ".part"


class Source(msgspec.Struct, frozen=True):
    """A file of a model, as it was when its weights were packed."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Source:
        """Raises OSError."""
        status = path.stat()
        return cls(str(path.resolve()), status.st_size, status.st_mtime_ns)

    def is_current(self) -> bool:
        """Returns whether the file still exists with this size and time."""
        try:
            return Source.of(Path(self.path)) == self
        except OSError:
            return False


class CacheHeader(msgspec.Struct, frozen=True):
    """The metadata of a cached file. `key`: what the packed weights depend on; `entries`: JSON of the arrays' owner."""

    key: str
    sources: list[Source]
    entries: msgspec.Raw


class UnusableFolder(Exception):
    """The folder cannot be used; the text says why."""


def folder() -> Path:
    """Returns the folder of packed weights, which may not exist yet. Raises UnusableFolder for a user without one."""
    try:
        return cache_folder() / "packed-weights"
    except RuntimeError as error:
        raise UnusableFolder("this user has no home folder; set XDG_CACHE_HOME") from error


def limit_bytes() -> int:
    """Returns the size that all files may have together. Raises UnusableFolder for a setting that is no number."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        limit = float(text) if text else DEFAULT_LIMIT_GB
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise UnusableFolder(f"{LIMIT_VARIABLE} is {text!r:.40}, not a number of gigabytes")
    return int(limit * 1e9)


def model_key(paths: Sequence[Path], depends_on: Sequence[str]) -> str:
    """Returns a key of the files' contents and of `depends_on`, independent of where the files are.

    Contents are told apart by size, time of the last change, and 4 KiB at 512 places. Raises OSError.
    """
    digest = hashlib.sha256("\0".join(depends_on).encode())
    for path in paths:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            name = path.name if len(paths) > 1 else ""
            digest.update(f"\0{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            last = max(0, status.st_size - SAMPLE_BYTES)
            for start in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()


def path_of(key: str) -> Path:
    """Returns the path of the file with this key."""
    return folder() / f"{key[:32]}{_SUFFIX}"


def load(key: str) -> tuple[ArrayFile, CacheHeader] | None:
    """Maps the file of this key and marks it as used; None if there is none.

    Raises DamagedFile, also for what is no private file, or UnusableFolder if the folder is not this user's own.
    """
    try:
        with _opened_folder() as folder_fd:
            fd = open_private(path_of(key).name, folder_fd=folder_fd)
            try:
                mapped = map_arrays(fd)
                with contextlib.suppress(OSError):  # a folder that can only be read
                    os.utime(fd)
            finally:
                os.close(fd)
    except FileNotFoundError:
        return None
    except OddFile as error:
        raise DamagedFile(error.strerror) from error
    except OSError as error:
        raise UnusableFolder(f"{path_of(key)} cannot be read ({error.strerror})") from error
    header = _decode(mapped.metadata)
    if header.key != key:
        raise DamagedFile("it belongs to another model")
    return mapped, header


def check_writable() -> None:
    """Raises UnusableFolder if the folder cannot be written, or cannot be created."""
    path = folder()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UnusableFolder(f"{existing} cannot be written; set XDG_CACHE_HOME to a folder of your own")


def remove(key: str) -> None:
    """Removes the file of this key, if there is one."""
    with contextlib.suppress(OSError):
        path_of(key).unlink()


def store(header: CacheHeader, arrays: Sequence[Bytes], before_part: Callable[[], None] = lambda: None) -> bool:
    """Writes the file of a model, unless another process does, it is larger than the limit, or its model has changed.

    Removes other files as far as needed. Returns whether the file exists now. before_part: called before each MiB;
    an exception that it raises ends the writing, and the unfinished file is removed. Raises UnusableFolder.
    """
    metadata, limit = msgspec.json.encode(header), limit_bytes()
    size = file_bytes(metadata, [array.nbytes for array in arrays])
    if size > limit or not all(source.is_current() for source in header.sources):
        return False
    target = path_of(header.key)
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened_folder() as folder_fd, _locked_part(target, folder_fd) as fd:
            if fd is None:
                return False
            _make_room(target, header, limit - size)
            free = os.statvfs(folder_fd)
            if free.f_bavail * free.f_frsize < size + FREE_BYTES:
                raise UnusableFolder(f"the disk of {target.parent} has too little space for {size / 1e9:.1f} GB more")
            write_arrays(fd, metadata, arrays, before_part)
            os.rename(target.with_suffix(_PART_SUFFIX), target)
    except OSError as error:
        raise UnusableFolder(f"{target.parent} cannot be written ({error.strerror})") from error
    return True


def stored_files() -> list[tuple[Path, os.stat_result]]:
    """Returns the complete files of the folder, the least recently used first."""
    files = []
    with contextlib.suppress(OSError):
        for path in folder().iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == _SUFFIX and stat.S_ISREG((status := path.lstat()).st_mode):
                    files.append((path, status))
    return sorted(files, key=lambda file: file[1].st_mtime_ns)


@contextlib.contextmanager
def _opened_folder() -> Iterator[int]:
    """Opens the folder. Raises UnusableFolder if others own it or may write there, and OSError."""
    fd = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not is_private(os.fstat(fd)):
            raise UnusableFolder(f"{folder()} belongs to another user, or others may write there")
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked_part(target: Path, folder_fd: int) -> Iterator[int | None]:
    """Opens the unfinished file of a target, empty and locked; None if another process has it or has finished it.

    It is removed after the block unless it was renamed.
    """
    name = target.with_suffix(_PART_SUFFIX).name
    fd = open_private(name, os.O_RDWR | os.O_CREAT, folder_fd)
    try:
        if not _lock(fd) or not _is_named(fd, name, folder_fd) or target.is_file():
            yield None
            return
        os.ftruncate(fd, 0)
        try:
            yield fd
        finally:
            if _is_named(fd, name, folder_fd):
                os.unlink(name, dir_fd=folder_fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Locks a file until it is closed; False if another process has locked it. Raises OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(fd: int, name: str, folder_fd: int) -> bool:
    """Returns whether the open file still has this name: another process may have renamed or removed it."""
    try:
        named, opened = os.stat(name, dir_fd=folder_fd, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _make_room(target: Path, header: CacheHeader, available: int) -> None:
    """Removes unfinished files that nobody writes, files whose model has changed, and then until the rest fits."""
    for path in folder().glob(f"*{_PART_SUFFIX}"):
        if path.name != target.with_suffix(_PART_SUFFIX).name:
            _remove_abandoned(path)
    kept = []
    for path, status in stored_files():
        if _is_outdated(path):
            path.unlink(missing_ok=True)
        else:
            kept.append((path, status.st_size))
    total = sum(size for _, size in kept)
    for path, size in kept:
        if total <= available:
            break
        path.unlink(missing_ok=True)
        total -= size


def _remove_abandoned(path: Path) -> None:
    """Removes an unfinished file unless a process writes it."""
    with contextlib.suppress(OSError):
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            if _lock(fd):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)


def _is_outdated(path: Path) -> bool:
    """Returns whether the file is damaged, or its model is no longer there as it was."""
    try:
        fd = open_private(path)
        try:
            return not all(source.is_current() for source in _decode(map_arrays(fd).metadata).sources)
        finally:
            os.close(fd)
    except (OSError, DamagedFile):
        return True


def _decode(metadata: bytes) -> CacheHeader:
    try:
        return msgspec.json.decode(metadata, type=CacheHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedFile("its header is not of this version") from error
