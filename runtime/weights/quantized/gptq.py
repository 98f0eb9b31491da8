"""GPTQ checkpoints (AutoGPTQ, GPTQModel) in 4 and 8 bits.

    qweight I32 [K / p, N]: p = 32 / bits codes of consecutive inputs in a word      scales [G, N]
    qzeros  I32 [G, N / p]: zero points, less 1 unless checkpoint_format is gptq_v2  g_idx I32 [K]: group of each input

With desc_act, g_idx is in the order of the inputs' importance. Layout: auto_gptq/nn_modules/qlinear/qlinear_cuda.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import Grid
from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models.checkpoint_interface import Range
from plait.runtime.weights.quantized.code_arrays import (
    CodeArray,
    ReadRows,
    transpose_words,
    unpack_fields,
    unpack_words,
)
from plait.runtime.weights.quantized.fields import ConfigFields
from plait.runtime.weights.quantized.module_names import ExactNames
from plait.runtime.weights.quantized.quantization import Quantization
from plait.runtime.weights.quantized.stored_module import FLOAT_TYPES, StoredModule, num_groups

# How the weights were found, and what other programs do with them: nothing here changes what the tensors mean.
NEUTRAL_FIELDS = (
    *("quant_method", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta", "tokenizer"),
    *("model_name_or_path", "model_file_base_name", "dataset", "backend", "model_seqlen", "block_name_to_quantize"),
    *("module_name_preceding_first_block", "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs"),
    *("modules_in_block_to_quantize", "exllama_config", "use_exllama", "disable_exllama", "use_cuda_fp16", "mse"),
    *("act_group_aware", "offload_to_disk", "offload_to_disk_path", "desc_act", "sym", "lm_head", "version", "v2"),
    *("v2_alpha", "v2_memory_device", "mock_quantization", "hessian_chunk_size", "vram_strategy", "is_marlin_format"),
)
GROUP_LIMIT = 1 << 20


def checked_group(fields: ConfigFields) -> int:
    """The field group_size: -1 or a number of inputs."""
    group = fields.integer("group_size", 128)
    if group != -1 and not 1 <= group <= GROUP_LIMIT:
        raise CorruptModel(f"quantization_config.group_size is {group}; it is -1 or the size of a group")
    return group


def describe_group(group: int) -> str:
    return "with a scale per output" if group == -1 else f"in groups of {group}"


def read_config(fields: ConfigFields) -> Quantization:
    """The quantization of a folder with quant_method gptq."""
    bits = fields.choice("bits", (4, 8))
    fields.choice("pack_dtype", ("int32",), "int32")
    fields.require_empty("is_marlin_format", "adapter", "rotation")
    versions = [fields.choice(name, ("gptq", "gptq_v2"), "gptq") for name in ("checkpoint_format", "format")]
    version = "gptq_v2" if "gptq_v2" in versions else "gptq"
    group = checked_group(fields)
    ignored = ExactNames([f"re:{pattern}" for pattern in _skipped(fields)])
    fields.skip(NEUTRAL_FIELDS)
    fields.refuse_rest()
    used = GptqFormat(bits, group, has_shifted_zeros=version == "gptq")
    return Quantization(f"GPTQ, {bits} bits {describe_group(group)}", [(None, used)], ignored)


def _skipped(fields: ConfigFields) -> list[str]:
    """The patterns in `dynamic` that take modules out. Raises UnsupportedModel for other settings of some modules."""
    dynamic = fields.get("dynamic", {})
    if not isinstance(dynamic, dict):
        raise CorruptModel("quantization_config.dynamic is not an object")
    for pattern, changes in dynamic.items():
        if not pattern.startswith("-:"):
            raise UnsupportedModel(
                f"quantization_config.dynamic gives {pattern!r:.60} other settings ({changes!r:.60}); plait reads only "
                "entries that leave modules unquantized (-:). Use a checkpoint with one setting for all modules"
            )
    return [pattern.removeprefix("-:") for pattern in dynamic]


@dataclass(frozen=True)
class GptqFormat:
    """Implements `ModuleFormat`. `has_shifted_zeros`: zero points are stored less 1."""

    bits: int
    group: int
    has_shifted_zeros: bool

    def is_used(self, module: StoredModule) -> bool:
        return module.has(".qweight")

    def check(self, module: StoredModule) -> None:
        per_word, groups = 32 // self.bits, num_groups(module, self.group)
        if module.inputs % per_word or module.outputs % per_word:
            raise module.corrupt(".qweight", f"holds [{module.outputs}, {module.inputs}], not multiples of {per_word}")
        module.require(".qweight", ["I32"], (module.inputs // per_word, module.outputs))
        module.require(".qzeros", ["I32"], (groups, module.outputs // per_word))
        module.require(".scales", FLOAT_TYPES, (groups, module.outputs))
        if module.has(".g_idx"):
            module.require(".g_idx", ["I32"], (module.inputs,))

    def grid(self, module: StoredModule) -> Grid:
        zeros = unpack_words(module.array(".qzeros"), self.bits).astype(np.int32)
        if self.has_shifted_zeros:
            zeros = (zeros + 1) & (2**self.bits - 1)
        group = module.inputs if self.group == -1 else self.group
        scales, groups = np.ascontiguousarray(module.floats(".scales").T), groups_of(module, ".g_idx", group)
        return Grid("int4" if self.bits == 4 else "int8", scales, group, np.ascontiguousarray(zeros.T), groups=groups)

    def codes(self, module: StoredModule, read: ReadRows, outputs: Range, inputs: Range) -> CodeArray:
        words, trim = words_around(inputs, self.bits)
        columns = (4 * outputs[0], 4 * outputs[1])
        octets = read(module.rows(".qweight", 4 * module.outputs, words, columns))  # [K / p, 4 N]
        return unpack_fields(transpose_words(octets), self.bits)[:, trim]


def words_around(fields: Range, bits: int) -> tuple[Range, slice]:
    """The 32-bit words that have a range of fields of 4 or 8 bits, and which fields of these words the range is."""
    per_word = 32 // bits
    first, end = fields[0] // per_word, math.ceil(fields[1] / per_word)
    return (first, end), slice(fields[0] - first * per_word, fields[1] - first * per_word)


def groups_of(module: StoredModule, suffix: str, group: int) -> npt.NDArray[np.int32] | None:
    """The group of each input; None if it is the input's number divided by the size of a group.

    Raises CorruptModel for a group that does not exist.
    """
    if not module.has(suffix):
        return None
    groups = module.integers(suffix)
    count = num_groups(module, group)
    if groups.min() < 0 or groups.max() >= count:
        raise module.corrupt(suffix, f"names the groups {groups.min()} to {groups.max()}; there are 0 to {count - 1}")
    return None if np.array_equal(groups, np.arange(module.inputs) // group) else groups
