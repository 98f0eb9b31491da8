"""The tensors of one quantized module in a folder of safetensors, and what a published format reads from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import Codes, Floats, Grid
from plait.runtime.errors import CorruptModel

FLOAT_TYPES = ("F16", "BF16", "F32")


class TensorInfo(NamedTuple):
    """Type and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


class StoredModule:
    """A linear layer [N, K] = [outputs, inputs] and its stored tensors, named by what follows the module's name.

    `info` returns the header's entry of a tensor, None for one that is not there; `read` its bytes.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        info: Callable[[str], TensorInfo | None],
        read: Callable[[str], npt.NDArray[np.uint8]],
    ) -> None:
        self.name, (self.outputs, self.inputs) = name, shape
        self._info, self._read = info, read

    def has(self, suffix: str) -> bool:
        return self._info(self.name + suffix) is not None

    def info(self, suffix: str) -> TensorInfo:
        """Raises CorruptModel if the tensor is missing."""
        found = self._info(self.name + suffix)
        if found is None:
            raise CorruptModel(f"the checkpoint has no tensor {self.name + suffix!r}; download it again")
        return found

    def is_stored(self, suffix: str, *dtypes: str) -> bool:
        """Whether the tensor is there and has one of these types."""
        found = self._info(self.name + suffix)
        return found is not None and found.dtype in dtypes

    def require(self, suffix: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> TensorInfo:
        """The tensor's header. Raises CorruptModel unless it has one of the types and one of the shapes."""
        found = self.info(suffix)
        if found.dtype not in dtypes or (shapes and found.shape not in shapes):
            expected = f"{' or '.join(dtypes)} {' or '.join(map(str, shapes))}"
            raise self.corrupt(suffix, f"is {found.dtype} {found.shape}, quantization_config says {expected}")
        return found

    def array(self, suffix: str) -> npt.NDArray[np.generic]:
        """The tensor as numpy holds it: integers as they are, bits of float8 as bytes, BF16 widened to float32."""
        info = self.info(suffix)
        raw = self._read(self.name + suffix)
        if info.dtype == "BF16":
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
        dtype = {"F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8", "I8": "i1"}.get(info.dtype, "u1")
        return raw.view(dtype).reshape(info.shape)

    def floats(self, suffix: str) -> Floats:
        """A tensor of floats in float32. Raises CorruptModel if a number is not finite."""
        values = self.array(suffix).astype(np.float32)
        if not np.isfinite(values).all():
            raise self.corrupt(suffix, "has numbers that are not finite")
        return values

    def integers(self, suffix: str) -> npt.NDArray[np.int32]:
        """A tensor of integers as int32."""
        return self.array(suffix).astype(np.int32)

    def corrupt(self, suffix: str, fault: str) -> CorruptModel:
        return CorruptModel(f"tensor {self.name + suffix!r} {fault}; the checkpoint is damaged or of another version")


class ModuleFormat(Protocol):
    """How one module is stored. All methods raise CorruptModel for tensors that do not fit."""

    def is_used(self, module: StoredModule) -> bool:
        """Whether the module is stored in this format, and not as plain floats."""

    def check(self, module: StoredModule) -> None:
        """Checks types and shapes, from the headers."""

    def grid(self, module: StoredModule) -> Grid:
        """Everything but the codes."""

    def codes(self, module: StoredModule) -> Codes:
        """The codes [N, K]."""


def unpack_words(words: npt.NDArray[np.generic], bits: int, order: Sequence[int] | None = None) -> Codes:
    """Splits 32-bit words [R, C] into fields of 4 or 8 bits [R, C * 32 / bits], the lowest bits first.

    `order`: field i of a word becomes number order[i] of its 32 / bits.
    """
    per_word = 32 // bits
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    octets = unsigned.astype("<u4", copy=False).view(np.uint8).reshape(*unsigned.shape, 4)
    if bits == 8:
        fields = octets
    else:
        fields = np.empty((*unsigned.shape, 4, 2), np.uint8)
        np.bitwise_and(octets, np.uint8(15), out=fields[..., 0])
        np.right_shift(octets, np.uint8(4), out=fields[..., 1])
    ordered = fields.reshape(*unsigned.shape, per_word)
    return (ordered if order is None else ordered[..., np.argsort(order)]).reshape(len(unsigned), -1)


def num_groups(module: StoredModule, group: int) -> int:
    """Groups of a row; group -1 is the complete row."""
    return 1 if group == -1 else math.ceil(module.inputs / group)
