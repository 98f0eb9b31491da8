"""Chooses the weight format and whether the packed CPU decoder runs, and gives the reason.

The packed CPU decoder needs llvmlite. It is imported only here and only if the CPU may run it.
Otherwise torch runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from plait.kernels.packed_support import packed_unsupported_reason
from plait.runtime.config import WeightFormat
from plait.runtime.errors import InputError
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.config import ModelConfig

WEIGHT_BITS: dict[WeightFormat, int] = {"int8": 8, "int4": 4}  # weights with more bits are rounded
# GGUF types that GPU kernels read directly -> bits
GPU_NATIVE_FORMATS = dict(Q2_K=2, Q3_K=3, Q4_0=4, Q4_1=4, Q4_K=4, Q5_0=5, Q5_1=5, Q5_K=5, Q6_K=6, Q8_0=8)
LoadProgress = Callable[[float], None]


class FormatChoice(NamedTuple):
    """The format that runs ("bf16": unquantized in `dtype`), whether the packed CPU decoder runs it, and the reason."""

    weight_format: WeightFormat
    packed: bool
    reason: str


def choose_weight_format(weights: Checkpoint, dtype: str, device: str, weight_format: WeightFormat) -> FormatChoice:
    """The format in which this model runs on this machine if `weight_format` is requested.

    `dtype` and `device` are names. Reads only the headers of the files. "as-stored" falls back to "bf16" with the
    reason; int8 and int4 raise InputError if they are not available.
    """
    is_default = weight_format == "auto"
    if weight_format == "auto":
        weight_format = _default_format(weights, dtype, device)
    widened = dtype if weights.quantization is None else f"{dtype}, dequantized from {weights.quantization}"
    if weight_format == "bf16":
        return FormatChoice("bf16", False, f"{widened}, multiplied by torch")
    reason = unsupported_reason(weights.config, dtype, device)
    if reason is not None and weight_format in WEIGHT_BITS:
        raise InputError(f"weights cannot be {weight_format}: {reason}")
    if reason is None and weight_format == "as-stored":
        reason = cpu_storage_mismatch(weights) if device == "cpu" else _gpu_storage_mismatch(weights)
    if reason is not None:
        return FormatChoice("bf16", False, f"{widened}, multiplied by torch: {reason}")
    if device != "cpu":
        return FormatChoice(weight_format, False, _describe_gpu_format(weights, weight_format, dtype))
    from plait.kernels.cpu.decoder import instruction_set

    numbers = (
        _describe_own_weights(weights)
        if weight_format == "as-stored"
        else f"weights with more bits ({stored_layouts(weights)}) are rounded to {weight_format}"
        + (", a CPU's default for safetensors: half the bytes" if is_default else "")
    )
    return FormatChoice(weight_format, True, f"{numbers}, packed: LLVM, {instruction_set()}")


def _default_format(weights: Checkpoint, dtype: str, device: str) -> WeightFormat:
    """The weights of quantized safetensors as they are. Else unquantized weights on a GPU; on a CPU the file's own, but
    int8 for safetensors of floats where that can run.
    """
    if weights.quantization is not None:
        return "as-stored"
    if device != "cpu":
        return "bf16"
    if weights.container == "gguf" or unsupported_reason(weights.config, dtype, device) is not None:
        return "as-stored"
    return "int8" if cpu_storage_mismatch(weights) is None else "as-stored"


def unsupported_reason(config: ModelConfig, dtype: str, device: str) -> str | None:
    """The reason why the model cannot run with 4- or 8-bit weights here; None if it can."""
    if device != "cpu":
        return _gpu_unsupported_reason(config, dtype, device)
    if (cpu_reason := packed_unsupported_reason()) is not None:
        return cpu_reason
    if dtype != "bfloat16":
        return f"packed weights need bfloat16, not {dtype}"
    if config.output_bias or config.mlp_bias:
        return "the packed kernels support biases of q, k and v only"
    widths: tuple[int, ...] = (config.hidden_size, config.intermediate_size, config.head_dim)
    if config.experts is not None:
        widths += (config.experts.intermediate_size,)
    if any(width % 32 for width in widths) or config.head_dim > 256:
        return f"the sizes {widths} are not all multiples of 32, or heads are wider than 256"
    return None


def cpu_storage_mismatch(weights: Checkpoint) -> str | None:
    """Names the first matrix whose stored type the packed decoder does not read; None if it reads all."""
    from plait.kernels.cpu.gemm.layouts import LAYOUTS

    for name in _matrix_names(weights):
        stored_type = weights.stored_type(name)
        if stored_type not in LAYOUTS:
            return f"{name} is stored as {stored_type}, not as {', '.join(LAYOUTS)}"
    return None


def stored_layouts(weights: Checkpoint) -> str:
    """Names the types in which the matrices are stored, the most frequent first."""
    counts = Counter(weights.stored_type(name) for name in _matrix_names(weights))
    return ", ".join(name for name, _ in counts.most_common())


def _describe_own_weights(weights: Checkpoint) -> str:
    """The stored weights as the packed CPU decoder holds them, and how many of them are rounded for it."""
    if weights.quantization is None:
        return f"the file's own weights ({stored_layouts(weights)})"
    quantized = [name for name in _matrix_names(weights) if weights.is_quantized(name)]
    rounded = sum(weights.stored_type(name) == "BF16" for name in quantized)
    text = f"the folder's own weights ({weights.quantization}), held as {stored_layouts(weights)}"
    if not rounded:
        return text
    return f"{text}; {rounded} of {len(quantized)} quantized matrices have no such form and are rounded to 16 bits"


def _matrix_names(weights: Checkpoint) -> list[str]:
    return [name for name in weights.names() if not name.endswith(("norm.weight", ".bias"))]


def _describe_gpu_format(weights: Checkpoint, weight_format: WeightFormat, dtype: str) -> str:
    own = "file's own 4- and 8-bit weights" if weights.quantization is None else f"folder's own: {weights.quantization}"
    as_stored = f"the {own}; matrices that are stored otherwise in {dtype}"
    rounded = f"weights with more bits are rounded to {weight_format}" + (
        ", the output head to int8" if weight_format == "int4" else ""
    )
    return f"{as_stored if weight_format == 'as-stored' else rounded}; multiplied by triton"


def _gpu_unsupported_reason(config: ModelConfig, dtype: str, device: str) -> str | None:
    if device != "cuda":
        return f"4- and 8-bit weights are for CPUs and CUDA devices, not for {device}"
    if config.experts is not None:
        return f"no GPU kernel multiplies the experts of {config.architecture} with 4 or 8 bits"
    import torch

    from plait.kernels.triton.support import HeadShape, triton_unsupported_reason

    return triton_unsupported_reason(
        getattr(torch, dtype), HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    )


def _gpu_storage_mismatch(weights: Checkpoint) -> str | None:
    """The reason why a GPU reads none of the stored matrices directly; None if it reads some."""
    matrices = _matrix_names(weights)
    if any(weights.is_quantized(name) for name in matrices):
        return None
    if weights.container == "gguf" and any(weights.stored_type(name) in GPU_NATIVE_FORMATS for name in matrices):
        return None
    return f"no matrix is stored as {', '.join(GPU_NATIVE_FORMATS)}"
