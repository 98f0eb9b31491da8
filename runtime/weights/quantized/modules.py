"""The quantized modules of a folder: which they are, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.kernels.matrix_layouts import layout_of, to_blocks
from plait.kernels.quantized_matrix import (
    Floats,
    Grid,
    QuantizedMatrix,
    dequantize,
    select_input_grid,
    select_output_grid,
)
from plait.runtime.errors import CorruptModel
from plait.runtime.models.checkpoint_interface import COMPLETE, WeightPart
from plait.runtime.weights.quantized.code_arrays import CodeArray, ReadRows
from plait.runtime.weights.quantized.quantization import Quantization
from plait.runtime.weights.quantized.stored_module import FLOAT_TYPES, ModuleFormat, StoredModule, TensorInfo
from plait.runtime.weights.stored_rows import StoredRows, read_rows

_SUFFIX = ".weight"
_EMBEDDING = "embed_tokens"  # is looked up, and not a linear layer


class _Module(NamedTuple):
    stored: StoredModule
    format: ModuleFormat


class QuantizedModules:
    """The modules that a folder stores as its quantization_config says.

    `info` returns the header's entry of a stored tensor, `locate` all its bytes as one row.
    """

    def __init__(
        self,
        quantization: Quantization | None,
        info: Callable[[str], TensorInfo | None],
        locate: Callable[[str], StoredRows],
    ) -> None:
        self._quantization, self._info, self._locate = quantization, info, locate
        self._modules: dict[str, _Module] = {}
        self._layouts: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the weight `name` is quantized."""
        return name in self._modules

    def add(self, name: str, shape: tuple[int, ...]) -> bool:
        """Checks the tensors of a weight, from their headers; returns whether it is quantized.

        A linear layer that is stored as floats stays so, whatever the config says of it. Raises CorruptModel for
        missing tensors, wrong types and shapes, and modules that the config excludes and that are quantized.
        """
        module = name.removesuffix(_SUFFIX)
        if self._quantization is None or len(shape) != 2 or module == name or module.endswith(_EMBEDDING):
            return False
        stored = StoredModule(module, (shape[0], shape[1]), self._info, self._locate)
        used = self._quantization.format_of(module)
        if used is None:
            if any(other.is_used(stored) for other in self._quantization.any_format()):
                raise CorruptModel(
                    f"{module} is quantized, but quantization_config in config.json excludes it; the two must agree"
                )
            return False
        if not used.is_used(stored) and stored.is_stored(_SUFFIX, *FLOAT_TYPES):
            return False
        used.check(stored)
        self._modules[name] = _Module(stored, used)
        return True

    def layout(self, name: str) -> str:
        """The GGUF type of the weight's numbers, else "BF16". Reads scales and zero points."""
        if name not in self._layouts:
            stored, used = self._modules[name]
            self._layouts[name] = layout_of(used.grid(stored), stored.inputs)
        return self._layouts[name]

    def grid(self, name: str, part: WeightPart = COMPLETE) -> Grid:
        """What decides about a part of the weight besides its codes."""
        stored, used = self._modules[name]
        grid, outputs = used.grid(stored), stored.outputs
        if part.outputs is not None:
            grid = select_output_grid(grid, outputs, part.outputs)
        return grid if part.inputs is None else select_input_grid(grid, stored.inputs, *part.inputs)

    def codes(self, name: str, read: ReadRows, part: WeightPart = COMPLETE) -> list[CodeArray]:
        """The codes of each range of the part's outputs, from bytes that `read` returns: arrays of its type."""
        stored, used = self._modules[name]
        ranges, inputs = part.ranges((stored.outputs, stored.inputs))
        return [used.codes(stored, read, outputs, inputs) for outputs in ranges]

    def blocks(self, name: str, layout: str) -> npt.NDArray[np.uint8]:
        """The weight in the blocks of its layout, or rounded to "BF16": uint8 [N, bytes of a row]."""
        return to_blocks(self._matrix(name), layout)

    def float32_array(self, name: str) -> Floats:
        """The weight in float32."""
        return dequantize(self._matrix(name))

    def _matrix(self, name: str) -> QuantizedMatrix:
        """The weight as it is stored, read by the calling thread."""
        (codes,) = self.codes(name, read_rows)
        return QuantizedMatrix(self.grid(name), codes)
