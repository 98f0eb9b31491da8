"""A tiny random Llama in a transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
