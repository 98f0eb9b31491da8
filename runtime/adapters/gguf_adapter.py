"""Reads adapters as llama.cpp stores them: GGUF files of the type "adapter"."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plait.runtime.adapters.adapter import EMBEDDING, LowRankUpdate, ReadUpdates, check_shapes, modules_of
from plait.runtime.arrays import Float32Array
from plait.runtime.errors import CorruptModel, InputError
from plait.runtime.model_files.gguf import GGUFFile, open_gguf
from plait.runtime.model_files.safetensors_bytes import BYTES, widen
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import FAMILIES_BY_NAME
from plait.runtime.weights.gguf_checkpoint import gguf_name, num_permuted_heads, unpermute_qk

_DOWN, _UP = ".lora_a", ".lora_b"


def open_gguf_adapter(name: str, path: Path, config: ModelConfig, shapes: WeightShapes) -> ReadUpdates:
    """Checks the adapter in a file, for a model of this config and these weights (`expected_shapes`), but for its
    numbers, which the returned function reads.

    Raises CorruptModel for a damaged file, and InputError for an adapter of another kind or model, which names the
    field or tensor.
    """
    file = open_gguf(path)
    alpha = _checked_alpha(name, file, config)
    family = FAMILIES_BY_NAME[config.architecture]
    modules = {gguf_name(f"{module}.weight", family.gguf_layer_names): module for module in modules_of(config, family)}
    for stored_name in file.tensors:
        base, part = stored_name[: -len(_DOWN)], stored_name[-len(_DOWN) :]
        if part not in (_DOWN, _UP) or base not in modules:
            raise InputError(
                f"the adapter {name!r} has the tensor {stored_name}, which plait cannot adapt in this model"
            )
        if base + _DOWN not in file.tensors or base + _UP not in file.tensors:
            raise CorruptModel(f"the adapter {name!r} has one of lora_a and lora_b of {base} only")
    bases = dict.fromkeys(stored_name[: -len(_DOWN)] for stored_name in file.tensors)
    for base in bases:
        shape_of = {part: _matrix_shape(file, base + part) for part in (_DOWN, _UP)}
        down_shape = shape_of[_DOWN][::-1] if modules[base] == EMBEDDING else shape_of[_DOWN]
        check_shapes(name, modules[base], down_shape, shape_of[_UP], shapes)

    def read() -> dict[str, LowRankUpdate]:
        updates = {}
        for base in bases:
            down, up = (_numbers(file, base + part) for part in (_DOWN, _UP))
            down = down.T if modules[base] == EMBEDDING else down  # stored as [tokens, rank]
            heads = num_permuted_heads(modules[base], config, family)
            up = unpermute_qk(up, heads) if heads else up
            updates[modules[base]] = LowRankUpdate(down, up * np.float32(alpha / len(down) if alpha else 1.0))
        return updates

    return read


def _checked_alpha(name: str, file: GGUFFile, config: ModelConfig) -> float:
    """The scale times the rank; 0: the scale is 1."""
    kind, lora = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if (kind, lora) != ("adapter", "lora"):
        raise InputError(f"the adapter {name!r}: {file.path.name} is no adapter but {kind or 'a model'!r}, {lora!r}")
    architecture = file.metadata.get("general.architecture")
    expected = FAMILIES_BY_NAME[config.architecture].gguf_architecture
    if architecture != expected:
        model = config.architecture if expected is None else expected
        raise InputError(f"the adapter {name!r} is for {architecture!r:.50}, the model is {model!r}")
    if any(key.startswith("adapter.alora") for key in file.metadata):
        raise InputError(f"the adapter {name!r} is an activated LoRA, which plait does not support")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float):
        raise CorruptModel(f"the adapter {name!r} has adapter.lora.alpha={alpha!r:.50}")
    return float(alpha)


def _matrix_shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    """The shape of a matrix of a type that can be read."""
    info = file.tensors[name]
    if info.quantization not in BYTES or len(info.shape) != 2 or 0 in info.shape:
        raise InputError(
            f"{name} is {info.quantization} {list(info.shape)}; an adapter has matrices of {', '.join(BYTES)}"
        )
    return info.shape


def _numbers(file: GGUFFile, name: str) -> Float32Array:
    """A matrix in float32."""
    info = file.tensors[name]
    return widen(info.quantization, file.tensor_bytes(name).reshape(info.shape[0], -1), info.shape)
