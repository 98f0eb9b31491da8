"""compressed-tensors checkpoints (llm-compressor): integers of 4 and 8 bits, float8, MXFP4.

    pack-quantized        weight_packed I32 [N, K bits / 32], weight_shape [2], weight_g_idx I32 [K] with actorder group
                          weight_zero_point I32 [N bits / 32, G] where it is not symmetric
    int-quantized         weight I8 [N, K], weight_zero_point I8
    float-quantized       weight F8_E4M3 [N, K]
    naive-quantized       one of the two before
    mxfp4-pack-quantized  weight_packed U8 [N, K / 2], the first code in the low bits; weight_scale U8 [N, K / 32]

All have weight_scale: one number, [N, 1], [N, G] or one for each block. For activations see `fp8`; those that other
programs quantize to integers stay in 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.quantized_matrix import E2M1, Grid
from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models.checkpoint_interface import Range
from plait.runtime.weights.quantized.code_arrays import CodeArray, ReadRows, split_nibbles, unpack_fields, unpack_words
from plait.runtime.weights.quantized.fields import ConfigFields
from plait.runtime.weights.quantized.fp8 import ACTIVATIONS_NOTE, FLOAT8_NOTE, Float8Format, checked_block
from plait.runtime.weights.quantized.gptq import checked_group, describe_group, groups_of, words_around
from plait.runtime.weights.quantized.module_names import ExactNames
from plait.runtime.weights.quantized.quantization import NameRule, Quantization
from plait.runtime.weights.quantized.stored_module import FLOAT_TYPES, ModuleFormat, StoredModule, num_groups

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
_OF_GROUPS = "mixed-precision"  # the format is in the groups
_LINEAR = "Linear"
_NEUTRAL_FIELDS = ("quant_method", "quantization_status", "global_compression_ratio", "version")
_NEUTRAL_ARGUMENTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def read_config(fields: ConfigFields) -> Quantization:
    """The quantization of a folder with quant_method compressed-tensors."""
    default = fields.choice("format", (*FORMATS, _OF_GROUPS))
    fields.require_empty("kv_cache_scheme", "transform_config", "moe_sparsity_config")
    sparsity = fields.child("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise UnsupportedModel(
            f"quantization_config.sparsity_config is {sparsity.get('format')!r:.40}, which plait does not read; use a "
            "checkpoint without sparsity"
        )
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CorruptModel("quantization_config.config_groups is not an object with groups")
    formats: list[tuple[NameRule | None, ModuleFormat]] = []
    descriptions: list[str] = []
    group_fields = fields.child("config_groups")
    for name in groups:
        rule, used, description = _read_group(group_fields.child(name), default)
        formats.append((rule, used))
        descriptions.append(description)
    formats.sort(key=lambda entry: entry[0] is None)  # names of modules come before the class of all
    ignored = ExactNames(fields.names("ignore"))
    fields.skip(_NEUTRAL_FIELDS)
    fields.refuse_rest()
    return Quantization(f"compressed-tensors, {' and '.join(dict.fromkeys(descriptions))}", formats, ignored)


def _read_group(fields: ConfigFields, default: str) -> tuple[NameRule | None, ModuleFormat, str]:
    """(its modules, None for all linear layers; their format; a description) of one group."""
    targets = fields.names("targets")
    if _LINEAR not in targets and any(target in ("Embedding", "ParallelLMHead") for target in targets):
        raise UnsupportedModel(f"{fields.where}.targets is {', '.join(targets):.80}; plait reads linear layers only")
    stored = fields.choice("format", FORMATS, None if default == _OF_GROUPS else default)
    fields.require_empty("output_activations")
    activations = _activation_type(fields)
    used, description = _read_weights(fields.child("weights"), stored)
    note = ACTIVATIONS_NOTE
    if isinstance(used, Float8Format):
        used = replace(used, quantizes_activations=activations == "float")
        note = FLOAT8_NOTE if used.quantizes_activations else note
    fields.refuse_rest()
    rule = None if _LINEAR in targets else ExactNames(targets)
    return rule, used, f"{description}; {note}" if activations is not None else description


def _activation_type(fields: ConfigFields) -> str | None:
    """What other programs quantize activations to, "int" or "float"; None if they do not.

    Raises UnsupportedModel for other activations than of 8 bits.
    """
    if fields.get("input_activations") is None:
        return None
    inputs = fields.child("input_activations")
    inputs.choice("num_bits", (8,), 8)
    kind: str = inputs.choice("type", ("int", "float"), "int")
    return kind


def _read_weights(weights: ConfigFields, stored: str) -> tuple[ModuleFormat, str]:
    """The format that the arguments of `weights` describe."""
    weights.choice("dynamic", (False,), False)
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), "tensor")
    symmetric, kind = weights.flag("symmetric", True), weights.choice("type", ("int", "float"), "int")
    bits = weights.choice("num_bits", (4, 8), 8)
    order = weights.choice("actorder", ("group", "weight", "static", "dynamic", "none"), "none")
    group = checked_group(weights) if strategy == "group" else -1
    block = weights.get("block_structure")
    weights.skip(("group_size", *_NEUTRAL_ARGUMENTS))
    weights.refuse_rest()
    scales = WeightScales(group, is_tensor=strategy == "tensor")
    if kind == "int" and strategy != "block":
        name = f"int{bits} {'with one scale' if scales.is_tensor else describe_group(group)}"
        if stored == "pack-quantized":
            return PackedIntFormat(bits, scales, symmetric, has_groups=order in ("group", "dynamic")), name
        if stored in ("int-quantized", "naive-quantized") and bits == 8:
            return IntFormat(scales, symmetric), name
    if kind == "float" and symmetric:
        if stored == "mxfp4-pack-quantized" and (bits, strategy, group) == (4, "group", 32):
            return Mxfp4Format(), "MXFP4"
        if stored in ("float-quantized", "naive-quantized") and bits == 8 and strategy != "group":
            sizes = checked_block("block_structure", block) if strategy == "block" else None
            grain = f"for each block of {sizes[0]} x {sizes[1]}" if sizes else f"per {strategy}"
            return Float8Format(sizes), f"fp8 with a scale {grain}"
    raise UnsupportedModel(
        f"{weights.where} are {bits}-bit {kind} weights per {strategy}"
        f"{'' if symmetric else ' with zero points'} in the format {stored}, which plait does not read; it reads int4 "
        "and int8 (pack-quantized), int8 (int-quantized), fp8 (float-quantized) and MXFP4"
    )


# -- compressed formats ---------------------------------------------------------------------------
# How compressed-tensors stores a module: integers in words or bytes, and MXFP4. Float8 is in `fp8`.


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
