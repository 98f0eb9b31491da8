"""The bytes of tensors in a safetensors file, mapped into memory, without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.runtime.errors import CorruptModel

LENGTH_BYTES = 8  # of the header's length, before the header
BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # types whose bytes can be read -> bytes of a number


class SafetensorsBytes:
    """A mapped file. The package `safetensors` must have opened it before, which checks its header."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
        length = int.from_bytes(self._bytes[:LENGTH_BYTES].tobytes(), "little")
        self._begin = LENGTH_BYTES + length
        self._header: dict[str, Any] = json.loads(self._bytes[LENGTH_BYTES : self._begin].tobytes())

    def rows(self, name: str, stored_type: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, uint8 [rows, bytes of a row]. Raises CorruptModel if they are not all there."""
        begin, end = self._header[name]["data_offsets"]
        found = self._bytes[self._begin + begin : self._begin + end]
        if len(found) != math.prod(shape) * BYTES[stored_type]:
            raise CorruptModel(f"{self._name} is truncated or damaged; download it again")
        return found.reshape(math.prod(shape[:-1]), -1)

    def extent(self, name: str) -> tuple[int, int]:
        """(where the bytes of a tensor of any type begin in the file, their number)"""
        begin, end = self._header[name]["data_offsets"]
        return self._begin + int(begin), int(end) - int(begin)


def widen(stored_type: str, rows: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Numbers of a type of `BYTES` as float32."""
    stored = np.ascontiguousarray(rows)
    if stored_type == "BF16":
        bits = stored.view("<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32).reshape(shape)
    if stored_type == "F16":
        return _widen_float16(stored).reshape(shape)
    return stored.view("<f4").astype(np.float32).reshape(shape)


def _widen_float16(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """In a third of the time that numpy takes: the bits move to their places in float32, and a factor makes up for the
    other bias of its exponents, which is exact. numpy converts infinities and NaN, whose exponent is the largest, and
    all numbers in a thread in which subnormal ones become 0."""
    bits = stored.view("<i2").astype(np.int32)
    bits <<= 13
    bits &= np.int32(-0x70002000)  # without the copies of the sign above the exponent
    wide, factor = bits.view(np.float32), np.float32(2.0**112)
    wide *= factor
    if np.float32(2.0**-149) * factor and max(wide.max(initial=0), -wide.min(initial=0)) < 2.0**16:
        return wide
    return stored.view("<f2").astype(np.float32)
