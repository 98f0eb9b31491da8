"""A tiny random Llama, saved as a transformers folder or as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def save_tiny_llama(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """Saves a random Llama with transformers, and returns it."""
    settings = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | heads | changes)))
    model.save_pretrained(folder, max_shard_size=changes.get("shard", "1GB"))
    return model


def interleaved(value: torch.Tensor, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter: the halves of each rotary pair side by side."""
    rows = value.reshape(heads, 2, -1, *value.shape[1:])
    return np.ascontiguousarray(rows.transpose(1, 2).reshape(value.shape).numpy())


def write_gguf(model: LlamaForCausalLM, path: Path, quantization: str, divisors: list[float] | None = None) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantization]
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    for name, value in model.state_dict().items():
        array = value.numpy()
        if "q_proj" in name:
            array = interleaved(value, config.num_attention_heads)
        if "k_proj" in name:
            array = interleaved(value, config.num_key_value_heads)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if array.ndim == 2 and quantization != "F32":
            writer.add_tensor(gguf_name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
