"""Weights in float8 e4m3 with a scale per tensor, per output, or for blocks of outputs and inputs.

    weight F8_E4M3 [N, K]      weight_scale, or weight_scale_inv: what the weight is multiplied by, in spite of its name

quant_method fp8 (transformers, vLLM, DeepSeek) and fbgemm_fp8. Activations are not quantized here: plait multiplies by
the same weights in more precision, and does not need input_scale, activation_scale and input_scale_ub.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from plait.kernels.quantized_matrix import E4M3_NAN, Grid
from plait.runtime.errors import CorruptModel
from plait.runtime.models.checkpoint_interface import Range
from plait.runtime.weights.quantized.code_arrays import CodeArray, ReadRows
from plait.runtime.weights.quantized.fields import ConfigFields
from plait.runtime.weights.quantized.module_names import PartialNames
from plait.runtime.weights.quantized.quantization import Quantization
from plait.runtime.weights.quantized.stored_module import FLOAT_TYPES, StoredModule

SCALE_NAMES = (".weight_scale_inv", ".weight_scale")
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_scale_ub")
ACTIVATIONS_NOTE = "activations stay in 16 bits"


def read_config(fields: ConfigFields) -> Quantization:
    """The quantization of a folder with quant_method fp8."""
    fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.choice("fmt", ("e4m3",), "e4m3")
    fields.choice("scale_fmt", ("float", "ue8m0"), "float")
    fields.choice("expert_dtype", ("fp8",), "fp8")
    fields.require_empty("modules_to_convert", "kv_cache_scheme")
    block = fields.get("weight_block_size")
    if block is not None:
        block = checked_block("weight_block_size", block)
    ignored = PartialNames(fields.names("modules_to_not_convert", "ignored_layers"))
    fields.skip(("quant_method", "dequantize"))
    fields.refuse_rest()
    grain = "a scale per tensor or output" if block is None else f"a scale per block of {block[0]} x {block[1]}"
    return Quantization(f"fp8, {grain}; {ACTIVATIONS_NOTE}", [(None, Float8Format(block))], ignored)


def read_fbgemm_config(fields: ConfigFields) -> Quantization:
    """The quantization of a folder with quant_method fbgemm_fp8."""
    ignored = PartialNames(fields.names("modules_to_not_convert"))
    fields.skip(("quant_method", "activation_scale_ub"))
    fields.refuse_rest()
    return Quantization(f"fp8, a scale per output; {ACTIVATIONS_NOTE}", [(None, Float8Format(None))], ignored)


def checked_block(name: str, block: object) -> tuple[int, int]:
    """(outputs, inputs) of a block."""
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or not 0 < n <= 2**20 for n in block):
        raise CorruptModel(f"quantization_config.{name} is {block!r:.60}, not two sizes")
    return block[0], block[1]


@dataclass(frozen=True)
class Float8Format:
    """Implements `ModuleFormat`. `block`: outputs and inputs that share a scale; None: per tensor or per output."""

    block: tuple[int, int] | None

    def is_used(self, module: StoredModule) -> bool:
        return module.is_stored(".weight", "F8_E4M3")

    def check(self, module: StoredModule) -> None:
        outputs = module.outputs
        module.require(".weight", ["F8_E4M3"], (outputs, module.inputs))
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        if self.block is not None:
            shapes = [(math.ceil(outputs / self.block[0]), math.ceil(module.inputs / self.block[1]))]
        module.require(self._scale(module), (*FLOAT_TYPES, "F8_E8M0"), *shapes)
        for suffix in ACTIVATION_SCALES:
            if module.has(suffix):
                module.require(suffix, FLOAT_TYPES, (), (1,), (1, 1))

    def grid(self, module: StoredModule) -> Grid:
        suffix = self._scale(module)
        if module.info(suffix).dtype == "F8_E8M0":
            scales = np.ldexp(np.float32(1), module.integers(suffix) - 127).astype(np.float32)
        else:
            scales = module.floats(suffix)
        if self.block is not None:
            return Grid("e4m3", scales, self.block[1], row_block=self.block[0])
        per_output = np.broadcast_to(scales.reshape(-1, 1), (module.outputs, 1))
        return Grid("e4m3", np.ascontiguousarray(per_output), module.inputs)

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        codes = read(module.rows(".weight", module.inputs, outputs, inputs))
        if ((codes & 0x7F) == E4M3_NAN).any():
            raise module.corrupt(".weight", "has weights that are not numbers")
        return codes

    def _scale(self, module: StoredModule) -> str:
        """The name of the scales; the first one that is there."""
        return next((suffix for suffix in SCALE_NAMES if module.has(suffix)), SCALE_NAMES[self.block is None])
