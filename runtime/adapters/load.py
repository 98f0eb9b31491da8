"""Opens and reads the files of adapters."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from plait.runtime.adapters.adapter import Adapter, ReadUpdates
from plait.runtime.adapters.gguf_adapter import open_gguf_adapter
from plait.runtime.adapters.peft_folder import CONFIG, WEIGHTS, open_peft_folder
from plait.runtime.errors import InputError
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import ModelConfig


class AdapterFiles(NamedTuple):
    """The files of an adapter, a folder of peft or a GGUF file, as they were when it was opened.

    identity: 32 hexadecimal digits of their sizes, times and inodes, which a write to one of them changes. num_bytes:
    of the numbers' file.
    """

    name: str
    path: Path
    identity: str
    num_bytes: int


class OpenAdapter(NamedTuple):
    """An adapter whose headers are checked. read_updates: reads its numbers."""

    files: AdapterFiles
    read_updates: ReadUpdates

    def read(self) -> Adapter:
        """The adapter. Raises InputError, also if its files have changed since, and ModelError."""
        name, path, identity, _ = self.files
        try:
            adapter = Adapter.of(name, self.read_updates())
            is_same = _identity(path) == identity
        except OSError as error:
            raise InputError(f"the adapter {name!r} cannot be read: {error}") from None
        if not is_same:
            raise _changed(name)
        return adapter


def open_adapter(name: str, path: str | Path, config: ModelConfig, shapes: WeightShapes) -> OpenAdapter:
    """Checks the headers of an adapter's files, for a model of this config and these weights (`expected_shapes`).

    Raises InputError and ModelError, which name the field or the tensor.
    """
    location = Path(path)
    try:
        if not (location.is_dir() or location.is_file()):
            raise InputError(f"the adapter {name!r}: there is no {path}")
        read = (open_peft_folder if location.is_dir() else open_gguf_adapter)(name, location, config, shapes)
        num_bytes = (location / WEIGHTS if location.is_dir() else location).stat().st_size
        return OpenAdapter(AdapterFiles(name, location, _identity(location), num_bytes), read)
    except OSError as error:
        raise InputError(f"the adapter {name!r} cannot be read: {error}") from None


def reopen_adapter(files: AdapterFiles, config: ModelConfig, shapes: WeightShapes) -> OpenAdapter:
    """`open_adapter` of files that were opened before. Raises InputError if they have changed since."""
    opened = open_adapter(files.name, files.path, config, shapes)
    if opened.files.identity != files.identity:
        raise _changed(files.name)
    return opened


def _changed(name: str) -> InputError:
    return InputError(f"the files of the adapter {name!r} have changed; unload it, and load it again")


def _identity(path: Path) -> str:
    files = [path / CONFIG, path / WEIGHTS] if path.is_dir() else [path]
    states = [file.stat() for file in files]
    numbers = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states]
    return hashlib.blake2b(repr(numbers).encode(), digest_size=16).hexdigest()
