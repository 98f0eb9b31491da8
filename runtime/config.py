"""The engine's settings: one frozen struct, handed down; the command line and `Runtime(...)` read their defaults here.

Knows: names, units, ranges. Must not know: torch, or what the settings are used for.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from plait.runtime.errors import InputError

_GIB = 1 << 30
WeightFormat = Literal["auto", "as-stored", "bf16", "int8", "int4"]
SchedulingOrder = Literal["fair", "first-come"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one runtime. Build it with `engine_config(...)`, which checks every field.

    model_path: a GGUF file, a folder of safetensors, or a Hugging Face id; empty: the embedded model.
    device: "auto" takes CUDA where there is one. dtype: of weights and KV; "auto" takes bfloat16 where the device
    computes it fast, and where weights are packed for a CPU, else float32. weights: "auto" is "as-stored" on a CPU,
    "bf16" elsewhere; "as-stored" uses a file's 4- and 8-bit numbers as they are where the CPU or CUDA device can;
    "int8" and "int4" round what has more bits, or refuse where that cannot be had; "bf16" widens what has fewer to
    `dtype`. kv_dtype: how keys and values are kept; "auto" is the model's dtype, "fp8" and "int8" take half the memory
    (on a GPU).
    kv_memory_bytes: 0 lets the engine choose. max_batch_tokens: tokens of one step (0: chosen by device).
    cuda_graphs: replay captured decode steps, on a GPU. prefix_groups: attention reads a prefix that rows of a step
    share once for all of them, where the operators can and it pays. deterministic: a call's tokens do not depend on its
    neighbours, on cache hits, chunking or retraction. order: who goes first, "fair" to tenants and programs or
    "first-come". prompt_lookup: several tokens that the text itself suggests are verified in one step, where steps
    are not captured graphs; tokens change no more than by other company in the batch. check_integrity: verify the page
    accounting after every step (slow).
    """

    model_path: str = ""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_dtype: Literal["auto", "fp8", "int8"] = "auto"
    weights: WeightFormat = "auto"
    kv_memory_bytes: int = 0
    max_pages: int = 0
    context_length: int = 0
    max_batch_tokens: int = 0
    max_batch_rows: int = 64
    max_sessions: int = 65536
    max_waiting_calls: int = 16384
    cuda_graphs: bool = True
    prefix_groups: bool = True
    deterministic: bool = False
    compile_deadline_s: float = 2.0
    order: SchedulingOrder = "fair"
    prompt_lookup: bool = True
    check_integrity: bool = False


_LIMITS = {
    "kv_memory_bytes": (0, 1 << 45),
    "max_pages": (0, 1 << 30),
    "context_length": (0, 1 << 24),
    "max_batch_tokens": (0, 1 << 20),
    "max_batch_rows": (1, 4096),
    "max_sessions": (1, 1 << 24),
    "max_waiting_calls": (1, 1 << 24),
}


def engine_config(**settings: Any) -> EngineConfig:
    """Checked settings; InputError names the one that is unknown, of the wrong type, or out of range.

    >>> engine_config(max_batch_rows=8).max_batch_rows
    8
    """
    unknown = settings.keys() - set(EngineConfig.__struct_fields__)
    if unknown:
        known = ", ".join(EngineConfig.__struct_fields__)
        raise InputError(f"unknown runtime setting {sorted(unknown)[0]!r}; known are: {known}")
    if settings.get("model_path") is not None:
        settings["model_path"] = str(settings["model_path"])
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        config = msgspec.convert(given, EngineConfig)
    except msgspec.ValidationError as error:
        raise InputError(f"a runtime setting does not fit: {error}") from None
    for name, (lowest, highest) in _LIMITS.items():
        if not lowest <= getattr(config, name) <= highest:
            raise InputError(f"{name} must be from {lowest} to {highest}, not {getattr(config, name)!r}")
    if not (math.isfinite(config.compile_deadline_s) and 0 < config.compile_deadline_s <= 600):
        raise InputError(f"compile_deadline_s must be above 0 to 600, not {config.compile_deadline_s!r}")
    return config
