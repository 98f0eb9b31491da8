"""Chooses the form in which a model's weights are held and multiplied, and says why.

A CPU has a decoder for packed weights, imported only where it can run: without numba the model runs by torch. A GPU
has products for them beside torch's.

Knows: which families, dtypes and processors have packed weights. Must not know: how they are built or multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from plait.runtime.config import WeightForm
from plait.runtime.errors import InputError
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.source import Checkpoint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BITS: dict[WeightForm, int] = {"int8": 8, "int4": 4}  # what has more is rounded
GPU_OWN = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # a GGUF's formats whose numbers a GPU takes as they are: bits
Progress = Callable[[float], None]


class Chosen(NamedTuple):
    """The form that runs ("bf16" stands for the plain `dtype`), and in words why; `packed`: by a CPU's decoder."""

    form: WeightForm
    packed: bool
    why: str


def choose_form(weights: Checkpoint, dtype: str, device: str, form: WeightForm) -> Chosen:
    """What `form` comes to with this model on this machine; InputError for int8 and int4 that cannot be had.

    Reads headers alone. "as-stored" falls back to plain numbers, with the reason. `dtype` and `device` are names.
    """
    if form == "auto":
        form = "as-stored" if device == "cpu" else "bf16"
    if form == "bf16":
        return Chosen("bf16", False, f"{dtype}, multiplied by torch")
    reason = why_not(weights.config, dtype, device)
    if reason is not None and form in BITS:
        raise InputError(f"weights cannot be {form}: {reason}")
    if reason is None and form == "as-stored":
        reason = stored_otherwise(weights) if device == "cpu" else _nothing_stored(weights)
    if reason is not None:
        return Chosen("bf16", False, f"{dtype}, multiplied by torch: {reason}")
    if device != "cpu":
        return Chosen(form, False, _on_gpu(form, dtype))
    from plait.kernels.cpu_decoder import instructions

    numbers = (
        "the file's own 4- and 8-bit numbers" if form == "as-stored" else f"what has more bits is rounded to {form}"
    )
    return Chosen(form, True, f"{numbers}, packed: numba, {instruction_set()}")


def why_not(config: ModelConfig, dtype: str, device: str) -> str | None:
    """Why this model has no packed form here; None if it has."""
    if device != "cpu":
        return _gpu_lacks(config, dtype, device)
    if (machine := _machine_lacks()) is not None:
        return machine
    if dtype != "bfloat16":
        return f"packed weights go with bfloat16, not with {dtype}"
    if config.architecture not in FAMILIES:
        return f"models of the family {config.architecture} have no packed form"
    if config.output_bias or config.mlp_bias:
        return "biases outside of q, k and v have no packed form"
    widths = (config.hidden_size, config.intermediate_size, config.head_dim)
    if any(width % 32 for width in widths) or config.head_dim > 256:
        return f"the sizes {widths} are not all multiples of 32, or heads are wider than 256"
    return None


def stored_otherwise(weights: Checkpoint) -> str | None:
    """The first matrix that is not stored in blocks the packed decoder takes as they are; None if all are."""
    from plait.kernels.cpu_packed import EXACT

    for name in weights.names():
        found = weights.stored_as(name)
        if not name.endswith(("norm.weight", ".bias")) and found not in EXACT:
            return f"{name} is stored as {found}, not as {', '.join(LOSSLESS_GGUF_FORMATS)}"
    return None


def _on_gpu(form: WeightForm, dtype: str) -> str:
    kept = f"the file's own 4- and 8-bit numbers; matrices that are stored otherwise in {dtype}"
    rounded = f"what has more bits is rounded to {form}" + (", the output head to int8" if form == "int4" else "")
    return f"{kept if form == 'as-stored' else rounded}; multiplied by triton"


def _gpu_lacks(config: ModelConfig, dtype: str, device: str) -> str | None:
    if device != "cuda":
        return f"4- and 8-bit weights are for CPUs and CUDA devices, not for {device}"
    if config.experts is not None:
        return f"the experts of {config.architecture} have no product with 4 or 8 bits on a GPU"
    import torch

    from plait.kernels.select_cuda import Heads, why_not_triton

    return why_not_triton(getattr(torch, dtype), Heads(config.num_heads, config.num_kv_heads, config.head_dim))


def _nothing_stored(weights: Checkpoint) -> str | None:
    """Why nothing in the file is used as it is on a GPU; None if something is."""
    matrices = [name for name in weights.names() if not name.endswith(("norm.weight", ".bias"))]
    if weights.container == "gguf" and any(weights.stored_as(name) in GPU_OWN for name in matrices):
        return None
    return f"no matrix is stored as {', '.join(GPU_OWN)}"


def _machine_lacks() -> str | None:
    try:
        from plait.kernels.cpu_decoder import missing_features
    except ImportError as error:
        return f"numba cannot be imported ({error})"
    missing = missing_features()
    return f"this CPU has no {', '.join(missing)}" if missing else None
