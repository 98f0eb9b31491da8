"""Reads GGUF files: the checked header, and the tensors' bytes as views of the mapped file.

The layout is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count in the header is compared with the
size of the file before memory is allocated for it, so a damaged file raises CorruptModel and cannot exhaust memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from plait.kernels.gguf_types import TENSOR_TYPES
from plait.runtime.errors import CorruptModel, ModelNotFound, UnsupportedModel

# Value types of the metadata: 0..7 and 10..12 are numbers, 8 a string, 9 an array.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"} | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRUCTS = {
    kind: struct.Struct("<" + letter)
    for kind, letter in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"}.items()
} | {7: struct.Struct("<?"), 10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
_STRING, _ARRAY = 8, 9

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_KEY_BYTES, _MAX_NAME_BYTES, _MAX_DIMENSIONS = 65_535, 1_024, 4
_MIN_ENTRY_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes
_DOWNLOAD_AGAIN = "download it again"


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor list. `shape` is row-major as in torch; `nbytes` is None for an unknown type."""

    name: str
    shape: tuple[int, ...]
    quantization: str
    offset: int  # bytes from the start of the file
    nbytes: int | None


class GGUFFile:
    """A mapped GGUF file. The `metadata` values are int, float, bool, str, list[str] or 1-d numpy arrays.

    >>> open_gguf("model.gguf").metadata["general.architecture"]  # doctest: +SKIP
    'llama'
    """

    def __init__(self, path: Path, mapped: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = metadata
        self.tensors: Mapping[str, TensorInfo] = tensors
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes [nbytes], a view of the mapped file. Writes to it do not reach the file.

        Raises CorruptModel if the tensor does not exist, UnsupportedModel if its type is unknown.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CorruptModel(f"{self.path.name} has no tensor {name!r}")
        if info.nbytes is None:
            raise UnsupportedModel(
                f"{self.path.name}: tensor {name!r} has the unknown {info.quantization}; "
                "use a file quantized to Q4_K_M, Q8_0 or F16"
            )
        return self._bytes[info.offset : info.offset + info.nbytes]


def open_gguf(path: str | Path, *, metadata_only: bool = False) -> GGUFFile:
    """Maps a GGUF file (version 2 or 3, little-endian) and reads its header.

    With `metadata_only`, the list of tensors may not be read and be empty. While an object for the complete file
    exists and the file has not changed, that is returned: a header takes a tenth of a second. Raises ModelNotFound,
    CorruptModel or UnsupportedModel.
    """
    path = Path(path)
    version = _version(path)
    known = _OPEN_FILES.get((path, *version)) if version else None
    if known is not None:
        return known
    file = _read_file(path, metadata_only)
    if version and version == _version(path) and not metadata_only:
        _OPEN_FILES[path, *version] = file
    return file


_OPEN_FILES = WeakValueDictionary[tuple[Any, ...], GGUFFile]()  # path and version -> the file, if it is in use


def _version(path: Path) -> tuple[int, ...]:
    """What changes with the file's contents; empty if there is no file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_file(path: Path, metadata_only: bool) -> GGUFFile:
    mapped = _mmap_file(path)
    reader = _HeaderReader(path.name, mapped)
    num_tensors, num_entries = reader.preamble()
    metadata = reader.metadata(num_entries)
    tensors = {} if metadata_only else reader.tensors(num_tensors, _alignment(path.name, metadata))
    return GGUFFile(path, mapped, metadata, tensors)


def _mmap_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Copy on write: torch needs writable arrays, and the file must not change.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise ModelNotFound(f"there is no file {path}") from error
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CorruptModel(f"{path} cannot be read as a GGUF file: it is empty or not a file") from error


def _alignment(file: str, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 65_536 or alignment & (alignment - 1):
        raise CorruptModel(f"{file}: general.alignment is not a power of two up to 65536; {_DOWNLOAD_AGAIN}")
    return alignment


class _HeaderReader:
    """Reads the header from front to back. Every read is checked against the end of the file."""

    def __init__(self, file: str, data: mmap.mmap) -> None:
        self.file, self.data, self.size, self.position = file, data, len(data), 0

    def corrupt(self, what: str) -> CorruptModel:
        return CorruptModel(f"{self.file} is truncated or damaged ({what}); {_DOWNLOAD_AGAIN}")

    def advance(self, count: int, what: str) -> int:
        """Moves past the next `count` bytes and returns where they start."""
        start = self.position
        if count > self.size - start:
            raise self.corrupt(f"{what} at byte {start} reaches past the end of the file")
        self.position = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.advance(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.advance(8, what))[0])

    def text(self, what: str, limit: int) -> str:
        count = self.u64(what)
        if count > limit:
            raise self.corrupt(f"{what} is {count} bytes long")
        start = self.advance(count, what)
        try:
            return self.data[start : start + count].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8") from error

    def preamble(self) -> tuple[int, int]:
        """(number of tensors, number of metadata entries)"""
        if self.data[:4] != b"GGUF":
            raise CorruptModel(f"{self.file} is not a GGUF file: it does not begin with the letters GGUF")
        self.advance(4, "the magic")
        version = self.u32("the version")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModel(f"{self.file} is a big-endian GGUF file; use the little-endian one")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.file} is GGUF version {version}; plait reads versions 2 and 3")
        num_tensors, num_entries = self.u64("the tensor count"), self.u64("the metadata count")
        if num_entries > self.size // _MIN_ENTRY_BYTES or num_tensors > self.size // _MIN_TENSOR_BYTES:
            raise self.corrupt(f"{num_tensors} tensors and {num_entries} metadata entries do not fit in it")
        return num_tensors, num_entries

    def metadata(self, count: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(count):
            key = self.text("a metadata key", _MAX_KEY_BYTES)
            if key in entries:
                raise self.corrupt(f"the metadata key {key!r} occurs twice")
            entries[key] = self.value(self.u32("a metadata type"), f"the value of {key!r}")
        return entries

    def value(self, kind: int, what: str) -> Any:
        if kind in _STRUCTS:
            layout = _STRUCTS[kind]
            return layout.unpack_from(self.data, self.advance(layout.size, what))[0]
        if kind == _STRING:
            return self.text(what, self.size)
        if kind == _ARRAY:
            return self.array(what)
        raise self.corrupt(f"{what} has the unknown type {kind}")

    def array(self, what: str) -> list[str] | npt.NDArray[Any]:
        kind, count = self.u32(what), self.u64(what)
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            raise UnsupportedModel(f"{self.file}: {what} is an array of arrays, which plait does not read")
        if kind not in _NUMBERS:
            raise self.corrupt(f"{what} is an array of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        start = self.advance(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, start).copy()

    def strings(self, count: int, what: str) -> list[str]:
        """Reads strings, each stored as its length (8 bytes) and its bytes.

        A tokenizer has 100,000 of them. This loop dominates the time to read a header, so it uses local names only.
        """
        if count > (self.size - self.position) // 8:
            raise self.corrupt(f"{what} is an array of {count} strings, more than fit in the file")
        data, unpack_length, position, last = self.data, _U64.unpack_from, self.position, self.size - 8
        strings: list[bytes] = []
        for _ in range(count):
            if position > last:
                raise self.corrupt(f"{what} ends inside an array")
            start = position + 8
            position = start + unpack_length(data, position)[0]
            strings.append(data[start:position])
        # A slice past the end is shorter than asked for, so one check after the loop covers every length.
        if position > self.size:
            raise self.corrupt(f"{what} reaches past the end of the file")
        self.position = position
        try:
            return [text.decode("utf-8") for text in strings]
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8") from error

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for _ in range(count):
            info = self.tensor()
            if info.name in tensors:
                raise self.corrupt(f"the tensor {info.name!r} occurs twice")
            tensors[info.name] = info
        data_start = -(-self.position // alignment) * alignment
        return {name: self.with_file_offset(info, data_start, alignment) for name, info in tensors.items()}

    def tensor(self) -> TensorInfo:
        """Reads one entry of the tensor list; its offset is relative to the start of the tensor data."""
        name = self.text("a tensor's name", _MAX_NAME_BYTES)
        num_dimensions = self.u32(f"the shape of {name!r}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.corrupt(f"tensor {name!r} has {num_dimensions} dimensions")
        dimensions = [self.u64(f"the shape of {name!r}") for _ in range(num_dimensions)]
        kind, offset = self.u32(f"the type of {name!r}"), self.u64(f"the offset of {name!r}")
        if min(dimensions) < 1:
            raise self.corrupt(f"tensor {name!r} has an empty dimension")
        shape = tuple(reversed(dimensions))
        if kind not in TENSOR_TYPES:
            return TensorInfo(name, shape, f"tensor type {kind}", offset, None)
        quantization, values, size = TENSOR_TYPES[kind]
        if shape[-1] % values:
            raise self.corrupt(f"a row of tensor {name!r} is not a whole number of {quantization} blocks")
        return TensorInfo(name, shape, quantization, offset, math.prod(shape) // values * size)

    def with_file_offset(self, info: TensorInfo, data_start: int, alignment: int) -> TensorInfo:
        """The entry with its offset relative to the start of the file. Raises CorruptModel if it does not fit in."""
        start = data_start + info.offset
        if info.offset % alignment:
            raise self.corrupt(f"tensor {info.name!r} is not aligned to {alignment} bytes")
        if start + (info.nbytes or 0) > self.size:
            raise self.corrupt(f"tensor {info.name!r} reaches past the end of the file")
        return TensorInfo(info.name, info.shape, info.quantization, start, info.nbytes)
