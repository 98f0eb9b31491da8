"""How compressed-tensors stores a module: integers in words or bytes, and MXFP4. Float8 is in `fp8`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import E2M1, Grid
from plait.runtime.models.checkpoint_interface import Range
from plait.runtime.weights.quantized.code_arrays import (
    CodeArray,
    ReadRows,
    split_nibbles,
    unpack_fields,
    unpack_words,
)
from plait.runtime.weights.quantized.gptq import groups_of, words_around
from plait.runtime.weights.quantized.stored_module import FLOAT_TYPES, StoredModule, num_groups


@dataclass(frozen=True)
class WeightScales:
    """What shares a scale. `group`: the inputs of a group, -1 for a complete row; `is_tensor`: one scale for all."""

    group: int = -1
    is_tensor: bool = False

    def shapes(self, module: StoredModule) -> list[tuple[int, ...]]:
        """The shapes that scales and zero points may have."""
        if self.is_tensor:
            return [(), (1,), (1, 1)]
        if self.group == -1:
            return [(module.outputs,), (module.outputs, 1)]
        return [(module.outputs, num_groups(module, self.group))]

    def inputs(self, module: StoredModule) -> int:
        """The inputs of a group."""
        return module.inputs if self.group == -1 else self.group

    def per_output(self, module: StoredModule, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Scales or zero points as [N, G]."""
        columns = values.shape[1] if values.ndim == 2 and not self.is_tensor else 1
        return np.ascontiguousarray(np.broadcast_to(values.reshape(-1, columns), (module.outputs, columns)))


@dataclass(frozen=True)
class PackedIntFormat:
    """Implements `ModuleFormat` for pack-quantized; `has_groups`: weight_g_idx has the group of each input."""

    bits: int
    scales: WeightScales
    symmetric: bool
    has_groups: bool

    def is_used(self, module: StoredModule) -> bool:
        return module.has(".weight_packed")

    def check(self, module: StoredModule) -> None:
        per_word, shapes = 32 // self.bits, self.scales.shapes(module)
        module.require(".weight_packed", ["I32"], (module.outputs, math.ceil(module.inputs / per_word)))
        module.require(".weight_shape", ["I64", "I32"], (2,))
        module.require(".weight_scale", FLOAT_TYPES, *shapes)
        if not self.symmetric:
            zeros = [(math.ceil(shape[0] / per_word), *shape[1:]) for shape in shapes if len(shape) == 2]
            module.require(".weight_zero_point", ["I32"], *zeros)
        if self.has_groups:
            module.require(".weight_g_idx", ["I32"], (module.inputs,))

    def grid(self, module: StoredModule) -> Grid:
        if module.integers(".weight_shape").tolist() != [module.outputs, module.inputs]:
            raise module.corrupt(".weight_shape", f"is not [{module.outputs}, {module.inputs}]")
        scales = self.scales.per_output(module, module.floats(".weight_scale"))
        middle = 2 ** (self.bits - 1)
        zeros: npt.NDArray[np.int32] | int = middle
        if not self.symmetric:
            words = np.ascontiguousarray(module.array(".weight_zero_point").T)  # [G, N / p]
            zeros = np.ascontiguousarray(unpack_words(words, self.bits)[:, : module.outputs].T).astype(np.int32)
        group = self.scales.inputs(module)
        groups = groups_of(module, ".weight_g_idx", group) if self.has_groups else None
        return Grid("int4" if self.bits == 4 else "int8", scales, group, zeros, groups=groups)

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        words, trim = words_around(inputs, self.bits)
        row_bytes = 4 * math.ceil(module.inputs * self.bits / 32)
        octets = read(module.rows(".weight_packed", row_bytes, outputs, (4 * words[0], 4 * words[1])))
        return unpack_fields(octets, self.bits)[:, trim]


@dataclass(frozen=True)
class IntFormat:
    """Implements `ModuleFormat` for int8 in bytes."""

    scales: WeightScales
    symmetric: bool

    def is_used(self, module: StoredModule) -> bool:
        return module.is_stored(".weight", "I8")

    def check(self, module: StoredModule) -> None:
        shapes = self.scales.shapes(module)
        module.require(".weight", ["I8"], (module.outputs, module.inputs))
        module.require(".weight_scale", FLOAT_TYPES, *shapes)
        if not self.symmetric:
            module.require(".weight_zero_point", ["I8"], *shapes)

    def grid(self, module: StoredModule) -> Grid:
        scales = self.scales.per_output(module, module.floats(".weight_scale"))
        zeros: npt.NDArray[np.int32] | int = 128
        if not self.symmetric:
            zeros = self.scales.per_output(module, module.integers(".weight_zero_point")) + 128
        return Grid("int8", scales, self.scales.inputs(module), zeros)

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        return read(module.rows(".weight", module.inputs, outputs, inputs)) ^ 128


@dataclass(frozen=True)
class Mxfp4Format:
    """Implements `ModuleFormat` for MXFP4: E2M1 in groups of 32 with powers of two as scales (E8M0)."""

    def is_used(self, module: StoredModule) -> bool:
        return module.has(".weight_packed")

    def check(self, module: StoredModule) -> None:
        if module.inputs % 32:
            raise module.corrupt(".weight_packed", f"holds {module.inputs} inputs, not a multiple of 32")
        module.require(".weight_packed", ["U8"], (module.outputs, module.inputs // 2))
        module.require(".weight_scale", ["U8", "F8_E8M0"], (module.outputs, module.inputs // 32))

    def grid(self, module: StoredModule) -> Grid:
        exponents = module.integers(".weight_scale")
        if exponents.max() > 254:
            raise module.corrupt(".weight_scale", "has scales that are not numbers")
        return Grid("table4", np.ldexp(np.float32(1), exponents - 127).astype(np.float32), 32, table=E2M1)

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        columns = (inputs[0] // 2, math.ceil(inputs[1] / 2))
        codes = split_nibbles(read(module.rows(".weight_packed", module.inputs // 2, outputs, columns)))
        return codes[:, inputs[0] % 2 :][:, : inputs[1] - inputs[0]]
