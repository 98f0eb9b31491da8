"""Reads an EAGLE-3 head from a folder as it is published: config.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from plait.runtime.arrays import IntArray
from plait.runtime.errors import CorruptModel, InputError, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.safetensors_bytes import BYTES, SafetensorsBytes, widen
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.draft_heads.eagle3 import Eagle3Head
from plait.runtime.models.draft_heads.eagle3_config import NUM_STATES, Eagle3Config, read_eagle3_config
from plait.runtime.models.draft_heads.embedding import model_embedding, row_reader

FILE = "model.safetensors"
_LAYER, _EMBEDDING = "midlayer.", "embed_tokens.weight"


def load_eagle3(folder: Path, model: Checkpoint, max_length: int) -> Eagle3Head:
    """Returns the head in a folder, for texts of a model of at most `max_length` tokens.

    A head without an embedding uses the model's.

    Raises ModelError, and InputError for a head that does not fit the model; the message names what does not.
    """
    config = read_eagle3_config(folder, model.config, max_length)
    if not (folder / FILE).is_file():
        raise ModelNotFound(f"draft: {folder} has no {FILE}; other files and formats of EAGLE-3 heads are not read")
    try:
        with safe_open(folder / FILE, framework="np") as file:
            return _load(folder / FILE, file, config, model)
    except SafetensorError as error:
        raise CorruptModel(f"draft: {FILE} is truncated or damaged; download it again") from error


def _load(path: Path, file: Any, config: Eagle3Config, model: Checkpoint) -> Eagle3Head:
    stored, names = SafetensorsBytes(path), set(file.keys())
    read = set[str]()

    def tensor(name: str, shape: tuple[int, ...]) -> tuple[str, Any]:
        """The type and the rows of a float tensor of this shape."""
        if name not in names:
            raise CorruptModel(f"draft: the EAGLE-3 head has no tensor {name}")
        found = file.get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise InputError(f"draft: {name} of the EAGLE-3 head has shape {tuple(found.get_shape())}, not {shape}")
        if found.get_dtype() not in BYTES:
            raise UnsupportedModel(f"draft: {name} of the EAGLE-3 head has the type {found.get_dtype()}")
        read.add(name)
        return found.get_dtype(), stored.rows(name, found.get_dtype(), shape)

    tensors = {name.removeprefix(_LAYER): widen(*tensor(name, shape), shape) for name, shape in _shapes(config).items()}
    embedding_shape = config.layer.vocab_size, config.layer.hidden_size
    if _EMBEDDING in names:
        embed = row_reader(*tensor(_EMBEDDING, embedding_shape))
    elif model.config.hidden_size == config.layer.hidden_size:
        embed = model_embedding(model)
    else:
        raise InputError(f"draft: the EAGLE-3 head has no {_EMBEDDING}, and the model's has another size")
    token_ids = _token_ids(file, names, config)
    unknown = names - read - {"d2t", "t2d"}
    if unknown:
        raise UnsupportedModel(f"draft: the EAGLE-3 head has a tensor {min(unknown)}, which plait does not know")
    return Eagle3Head(config, tensors, embed, token_ids)


def _shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    layer = config.layer
    size, inner, head_size = layer.hidden_size, layer.intermediate_size, layer.head_dim
    heads, kv_heads = layer.num_heads * head_size, layer.num_kv_heads * head_size
    of_layer = {
        "input_layernorm": (size,),
        "hidden_norm": (size,),
        "self_attn.q_proj": (heads, 2 * size),
        "self_attn.k_proj": (kv_heads, 2 * size),
        "self_attn.v_proj": (kv_heads, 2 * size),
        "self_attn.o_proj": (size, heads),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    return {f"{_LAYER}{name}.weight": shape for name, shape in of_layer.items()} | {
        "fc.weight": (size, NUM_STATES * config.model_size),
        "norm.weight": (size,),
        "lm_head.weight": (config.draft_vocab_size, size),
    }


def _token_ids(file: Any, names: set[str], config: Eagle3Config) -> IntArray:
    """The model's token of each output: its own number, and what `d2t` adds to it."""
    token_ids = np.arange(config.draft_vocab_size, dtype=np.int64)
    if "d2t" in names:
        found = file.get_slice("d2t")
        shape, stored_type = tuple(found.get_shape()), found.get_dtype()
        if shape != token_ids.shape or stored_type not in ("I64", "I32"):
            expected = f"{token_ids.shape} and I64"
            raise InputError(f"draft: d2t of the EAGLE-3 head has shape {shape} and type {stored_type}, not {expected}")
        token_ids = token_ids + file.get_tensor("d2t")
    elif config.draft_vocab_size != config.layer.vocab_size:
        raise CorruptModel("draft: the EAGLE-3 head has draft_vocab_size, but no tensor d2t")
    if token_ids.min() < 0 or token_ids.max() >= config.layer.vocab_size:
        raise CorruptModel("draft: d2t of the EAGLE-3 head names tokens that the vocabulary does not have")
    return token_ids.astype(np.int32)
