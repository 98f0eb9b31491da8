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

from dataclasses import replace

from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.weights.quantized.compressed_formats import IntFormat, Mxfp4Format, PackedIntFormat, WeightScales
from plait.runtime.weights.quantized.fields import ConfigFields
from plait.runtime.weights.quantized.fp8 import ACTIVATIONS_NOTE, FLOAT8_NOTE, Float8Format, checked_block
from plait.runtime.weights.quantized.gptq import checked_group, describe_group
from plait.runtime.weights.quantized.module_names import ExactNames
from plait.runtime.weights.quantized.quantization import NameRule, Quantization
from plait.runtime.weights.quantized.stored_module import ModuleFormat

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
