"""A model's weights under Hugging Face names, from a GGUF file or a folder of safetensors.

Every tensor the config calls for is looked for, and its shape compared, when the checkpoint is opened.
Knows: both containers and how their names and row orders differ. Must not know: the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from plait.kernels.dequantize import BLOCK, dequantize
from plait.runtime.errors import CorruptModel, InputError, ModelNotFound, UnsupportedModel
from plait.runtime.models.config import ModelConfig, from_gguf, from_hf
from plait.runtime.models.json_file import read_json_object
from plait.runtime.weights.gguf import GGUFFile, open_gguf

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint(Protocol):
    """Weights by name. `tensor` gives a fresh tensor, `raw` the stored blocks of a GGUF file.

    >>> weights = open_checkpoint("model.gguf")  # doctest: +SKIP
    >>> weights.tensor("model.norm.weight", torch.float32, "cpu").shape  # doctest: +SKIP
    torch.Size([576])
    """

    config: ModelConfig

    def names(self) -> tuple[str, ...]:
        """Every tensor the model needs, in the order of the layers."""

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """The weight [rows, columns] or [rows]. Raises CorruptModel or UnsupportedModel."""

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        """(quantization, uint8 blocks [rows, bytes per row], shape); InputError for safetensors."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file or a Hugging Face folder.

    Raises ModelNotFound, CorruptModel (a tensor is missing or has another shape than the config says) or
    UnsupportedModel.
    """
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"there is no model at {path}")
    return _SafetensorsCheckpoint(path) if path.is_dir() else _GGUFCheckpoint(path)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config needs."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    mlp = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in (f"model.layers.{i}." for i in range(config.num_layers)):
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        for block, linears, bias in (
            ("self_attn", attention, config.attention_bias),
            ("mlp", mlp, config.mlp_bias),
        ):
            for name, (rows, columns) in linears.items():
                shapes[f"{layer}{block}.{name}_proj.weight"] = (rows, columns)
                if bias:
                    shapes[f"{layer}{block}.{name}_proj.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _check_shape(name: str, found: Sequence[int] | None, expected: tuple[int, ...]) -> None:
    if found is None:
        raise CorruptModel(f"the checkpoint has no tensor {name!r}; download it again")
    if tuple(found) != expected:
        raise CorruptModel(f"tensor {name!r} has the shape {tuple(found)}, the config says {expected}")


def _known(name: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    if name not in shapes:
        raise CorruptModel(f"the checkpoint has no tensor {name!r}")
    return shapes[name]


# ---------------------------------------------------------------- GGUF

_GGUF_GLOBAL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`"""
    module, _, kind = name.rpartition(".")
    if module in _GGUF_GLOBAL:
        return f"{_GGUF_GLOBAL[module]}.{kind}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_LAYER[inner]}.{kind}"


class _GGUFCheckpoint:
    def __init__(self, path: Path) -> None:
        self.file = open_gguf(path)
        self.config = _gguf_config(self.file)
        self.shapes = expected_shapes(self.config)
        for name, shape in self.shapes.items():
            info = self.file.tensors.get(_gguf_name(name))
            _check_shape(name, info.shape if info else None, shape)

    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        shape = _known(name, self.shapes)
        info = self.file.tensors[_gguf_name(name)]
        rows = self.file.raw(info.name).reshape(shape[0] if len(shape) > 1 else 1, -1)
        # llama.cpp keeps the two halves of each head's rotary pairs interleaved: a permutation of whole rows,
        # so the stored blocks can be put in order as they are.
        for projection, heads in (("q", self.config.num_heads), ("k", self.config.num_kv_heads)):
            if f"self_attn.{projection}_proj" in name:
                rows = _half_rotation(rows if len(shape) > 1 else rows.reshape(shape[0], -1), heads)
        return info.quantization, rows, shape

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        quantization, rows, shape = self.raw(name)
        if quantization not in BLOCK:
            raise UnsupportedModel(f"tensor {name!r} is stored as {quantization}; plait reads {', '.join(BLOCK)}")
        blocks = torch.from_numpy(rows).to(device)  # the packed form crosses to the device, not the wide one
        return dequantize(blocks, quantization, shape).to(dtype)


def _half_rotation(rows: npt.NDArray[np.uint8], heads: int) -> npt.NDArray[np.uint8]:
    """Rows (head, i, half) to rows (head, half, i): uint8 [R, bytes] -> [R, bytes], a copy."""
    split = rows.reshape(heads, -1, 2, rows.shape[1])  # [heads, head_dim / 2, 2, bytes]
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _gguf_config(file: GGUFFile) -> ModelConfig:
    return from_gguf(
        file.metadata,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        rope_divisors=_rope_divisors(file),
    )


def _rope_divisors(file: GGUFFile) -> list[float] | None:
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    if info.quantization != "F32" or len(info.shape) != 1:
        raise CorruptModel("the tensor rope_freqs.weight is not a row of F32")
    return [float(x) for x in file.raw(info.name).view("<f4")]


# ---------------------------------------------------------------- safetensors


class _SafetensorsCheckpoint:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = from_hf(read_json_object(folder / "config.json"))
        self.shapes = expected_shapes(self.config)
        self.opened: dict[tuple[str, str], Any] = {}
        self.file_of = self._locate()
        for name, shape in self.shapes.items():
            file = self.file_of.get(name)
            _check_shape(name, self._stored_shape(file, name) if file else None, shape)

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or from the single file."""
        if not (self.folder / _INDEX).exists():
            return dict.fromkeys(self._open(_SINGLE, "cpu").keys(), _SINGLE)
        file_of = read_json_object(self.folder / _INDEX).get("weight_map")
        if not isinstance(file_of, dict):
            raise CorruptModel(f"{_INDEX} has no weight_map")
        for file in file_of.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CorruptModel(f"{_INDEX} names {file!r:.80}, no safetensors file of its folder")
        return file_of

    def _open(self, file: str, device: str) -> Any:
        handle = self.opened.get((file, device))
        if handle is None:
            try:
                handle = safe_open(str(self.folder / file), framework="pt", device=device)
            except FileNotFoundError as error:
                raise ModelNotFound(f"{self.folder} has no {file}") from error
            except (SafetensorError, OSError) as error:
                raise _damaged(file) from error
            self.opened[file, device] = handle
        return handle

    def _stored_shape(self, file: str, name: str) -> list[int] | None:
        try:
            shape: list[int] = self._open(file, "cpu").get_slice(name).get_shape()
        except SafetensorError:
            return None
        return shape

    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]:
        raise InputError("raw blocks exist in GGUF files only; use tensor()")

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        _known(name, self.shapes)
        file = self.file_of[name]
        try:
            stored: torch.Tensor = self._open(file, str(device)).get_tensor(name)
        except SafetensorError as error:
            raise _damaged(file) from error
        if stored.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModel(f"tensor {name!r} is stored as {stored.dtype}; plait reads 32 and 16 bits")
        return stored.to(dtype)


def _damaged(file: str) -> CorruptModel:
    return CorruptModel(f"{file} is truncated or damaged; download it again")
