"""bitsandbytes checkpoints: NF4 and FP4 in blocks of the flattened weight, and int8 with a scale per output.

weight U8 [N K / 2, 1]: the first of two codes in the high bits      weight.quant_map F32 [16]
weight.absmax: F32, or U8 where it is quantized too (nested_absmax, nested_quant_map, nested_offset)
weight.quant_state.bitsandbytes__nf4: bytes of JSON

weight I8 [N, K]      SCB F32 [N]: 127 times the scale      weight_format U8: 0
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np

from plait.kernels.quantized_matrix import Floats, Grid
from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models.checkpoint_interface import Range
from plait.runtime.weights.quantized.code_arrays import CodeArray, ReadRows, split_nibbles
from plait.runtime.weights.quantized.fields import ConfigFields
from plait.runtime.weights.quantized.module_names import PartialNames
from plait.runtime.weights.quantized.quantization import Quantization
from plait.runtime.weights.quantized.stored_module import ModuleFormat, StoredModule

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_NEUTRAL_FIELDS = (  # about computing, not about the stored weights
    *("quant_method", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"),
    *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_threshold"),
)


def read_config(fields: ConfigFields) -> Quantization:
    """The quantization of a folder with quant_method bitsandbytes."""
    is_4_bit, is_8_bit = fields.flag("load_in_4bit", False), fields.flag("load_in_8bit", False)
    if is_4_bit == is_8_bit:
        raise CorruptModel("quantization_config must set one of load_in_4bit and load_in_8bit")
    kind = fields.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "nf4" if not is_4_bit else "fp4")
    fields.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
    ignored = PartialNames(fields.names("llm_int8_skip_modules"))
    fields.skip(_NEUTRAL_FIELDS)
    fields.refuse_rest()
    used: ModuleFormat = Bnb4Format(kind) if is_4_bit else Bnb8Format()
    description = f"bitsandbytes, {kind}" if is_4_bit else "bitsandbytes, int8; activations stay in 16 bits"
    return Quantization(description, [(None, used)], ignored)


@dataclass(frozen=True)
class Bnb4Format:
    """Implements `ModuleFormat` for 4 bits; `kind` is nf4 or fp4."""

    kind: str

    def is_used(self, module: StoredModule) -> bool:
        return module.is_stored(".weight", "U8") or module.has(".weight.absmax")

    @property
    def _state(self) -> str:
        return f".weight.quant_state.bitsandbytes__{self.kind}"

    def check(self, module: StoredModule) -> None:
        size = module.outputs * module.inputs
        if size % 2:
            raise module.corrupt(".weight", "has an odd number of weights")
        module.require(".weight", ["U8"], (size // 2, 1))
        module.require(".weight.quant_map", ["F32"], (16,))
        module.require(self._state, ["U8"])
        if module.require(".weight.absmax", ["F32", "U8"]).dtype == "U8":
            module.require(".weight.nested_absmax", ["F32"])
            module.require(".weight.nested_quant_map", ["F32"], (256,))

    def grid(self, module: StoredModule) -> Grid:
        state = self._read_state(module)
        block = state.integer("blocksize")
        if block not in BLOCK_SIZES or state.get("shape") != [module.outputs, module.inputs]:
            raise module.corrupt(self._state, f"says blocks of {block} and the shape {state.get('shape')!r:.40}")
        absmax = self._absmax(module, state, block)
        # A block may reach into the next row. What surely lies in one block is their common divisor.
        group = math.gcd(block, module.inputs)
        starts = np.arange(0, module.outputs * module.inputs, group)
        scales = absmax[starts // block].reshape(module.outputs, -1)
        return Grid("table4", scales, group, table=module.floats(".weight.quant_map"))

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        if module.inputs % 2:  # a byte reaches into the next row: complete pairs of rows are read
            first, end = outputs[0] // 2, math.ceil(outputs[1] / 2)
            octets = read(module.rows(".weight", module.inputs, (first, end), (0, module.inputs)))
            codes = split_nibbles(octets, high_first=True).reshape(-1, module.inputs)
            return codes[outputs[0] - 2 * first : outputs[1] - 2 * first, inputs[0] : inputs[1]]
        columns = (inputs[0] // 2, math.ceil(inputs[1] / 2))
        codes = split_nibbles(read(module.rows(".weight", module.inputs // 2, outputs, columns)), high_first=True)
        return codes[:, inputs[0] % 2 :][:, : inputs[1] - inputs[0]]

    def _read_state(self, module: StoredModule) -> ConfigFields:
        try:
            return ConfigFields(json.loads(module.array(self._state).tobytes()), module.name + self._state)
        except (ValueError, RecursionError) as error:
            raise module.corrupt(self._state, "is not JSON") from error

    def _absmax(self, module: StoredModule, state: ConfigFields, block: int) -> Floats:
        """The largest magnitude of each block."""
        blocks = math.ceil(module.outputs * module.inputs / block)
        if module.info(".weight.absmax").shape != (blocks,):
            raise module.corrupt(".weight.absmax", f"has not the {blocks} blocks of the weight")
        if module.info(".weight.absmax").dtype == "F32":
            return module.floats(".weight.absmax")
        nested, offset = state.integer("nested_blocksize"), state.get("nested_offset")
        outer = module.floats(".weight.nested_absmax")
        if nested < 1 or outer.shape != (math.ceil(blocks / nested),) or type(offset) not in (int, float):
            raise module.corrupt(self._state, "does not fit nested_absmax")
        numbers = module.floats(".weight.nested_quant_map")[module.integers(".weight.absmax")]
        absmax: Floats = numbers * outer[np.arange(blocks) // nested] + np.float32(offset)
        return absmax


@dataclass(frozen=True)
class Bnb8Format:
    """Implements `ModuleFormat` for int8."""

    def is_used(self, module: StoredModule) -> bool:
        return module.is_stored(".weight", "I8")

    def check(self, module: StoredModule) -> None:
        module.require(".weight", ["I8"], (module.outputs, module.inputs))
        module.require(".SCB", ["F32"], (module.outputs,))
        if module.has(".weight_format"):
            module.require(".weight_format", ["U8"], (), (1,))

    def grid(self, module: StoredModule) -> Grid:
        if module.has(".weight_format") and module.integers(".weight_format").any():
            raise UnsupportedModel(
                f"{module.name} is stored in a GPU's own order (weight_format is not 0); save the model again with "
                "bitsandbytes 0.43 or newer"
            )
        return Grid("int8", module.floats(".SCB")[:, None] / np.float32(127), module.inputs, zeros=128)

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        return read(module.rows(".weight", module.inputs, outputs, inputs)) ^ 128
