"""The tensors of one quantized module in a folder of safetensors, and what a published format reads from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import Floats, Grid
from plait.runtime.errors import CorruptModel
from plait.runtime.models.checkpoint_interface import Range
from plait.runtime.weights.quantized.code_arrays import CodeArray, ReadRows
from plait.runtime.weights.stored_rows import StoredRows, read_rows

FLOAT_TYPES = ("F16", "BF16", "F32")


class TensorInfo(NamedTuple):
    """Type and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


class StoredModule:
    """A linear layer [N, K] = [outputs, inputs] and its stored tensors, named by what follows the module's name.

    `info` returns the header's entry of a tensor, None for one that is not there; `locate` all its bytes as one row.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        info: Callable[[str], TensorInfo | None],
        locate: Callable[[str], StoredRows],
    ) -> None:
        self.name, (self.outputs, self.inputs) = name, shape
        self._info, self._locate = info, locate

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
        raw = read_rows(self._locate(self.name + suffix)).reshape(-1)
        if info.dtype == "BF16":
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
        dtype = {"F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8", "I8": "i1"}.get(info.dtype, "u1")
        return raw.view(dtype).reshape(info.shape)

    def rows(self, suffix: str, row_bytes: int, rows: Range, columns: Range) -> StoredRows:
        """A part of the tensor as a matrix of bytes with `row_bytes` in a row: its bytes `columns` of some rows."""
        return self._locate(self.name + suffix)._replace(row_bytes=row_bytes, rows=(rows,), columns=columns)

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

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        """The codes of a range of the outputs and inputs, from bytes that `read` returns."""


def num_groups(module: StoredModule, group: int) -> int:
    """Groups of a row; group -1 is the complete row."""
    return 1 if group == -1 else math.ceil(module.inputs / group)
