"""Adapters of all types of floats, also of several in one file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter
from tiny_hf_models import randomized
from transformers import LlamaConfig, LlamaForCausalLM

from plait.runtime.adapters.load import open_adapter
from plait.runtime.model_files.safetensors_bytes import widen
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Adapters of several ranks: with biases, and in a file that has the model's own embedding and head too."""
    folder = tmp_path_factory.mktemp("adapter")
    model = randomized(LlamaForCausalLM(LlamaConfig(**SIZES)))
    model.save_pretrained(folder / "base")
    targets, ranks = ["q_proj", "down_proj"], {"r": 8, "rank_pattern": {"q_proj": 3}}
    make_adapter(model, folder / "biased", 1, target_modules=targets, lora_bias=True, **ranks)
    make_adapter(model, folder / "outer", 1, target_modules=[*targets, "embed_tokens", "lm_head"], **ranks)
    return folder


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["biased", "outer"]), st.lists(st.sampled_from(TYPES), min_size=1, max_size=9))
def test_numbers_are_those_of_the_file(saved, name, types):
    weights = saved / name / "adapter_model.safetensors"
    tensors = {key: t.to(types[i % len(types)]) for i, (key, t) in enumerate(load_file(weights).items())}
    save_file(tensors, weights)
    config = open_checkpoint(saved / "base").config
    adapter = open_adapter(name, saved / name, config, expected_shapes(config)).read()
    fields = json.loads((saved / name / "adapter_config.json").read_text())
    stored = {
        key.removeprefix("base_model.model.").replace("_embedding", "").removesuffix(".weight"): tensor.float().numpy()
        for key, tensor in tensors.items()
    }
    read = 0
    for module, update in adapter.updates.items():
        scale = np.float32(fields["lora_alpha"] / len(update.down))
        assert np.array_equal(update.down, stored[f"{module}.lora_A"])
        assert np.array_equal(update.up, stored[f"{module}.lora_B"] * scale)
        assert (update.bias is None) == (f"{module}.lora_B.bias" not in stored)
        assert update.bias is None or np.array_equal(update.bias, stored[f"{module}.lora_B.bias"] * scale)
        read += 2 + (update.bias is not None)
    assert read == sum("lora_" in key for key in stored)


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("are_finite", [True, False])
def test_every_float16_is_widened_exactly(are_finite, flushes):
    """Also in a thread in which subnormal numbers become 0."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)] if are_finite else numbers
    expected = numbers.astype(np.float32).view(np.uint32)
    torch.set_flush_denormal(flushes)
    try:
        wide = widen("F16", numbers.view(np.uint8).reshape(2, -1), (2, len(numbers) // 2))
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(wide.view(np.uint32).reshape(-1), expected)
