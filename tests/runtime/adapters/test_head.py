"""Adapters of the output head and the embedding: partial logits, argmax, biases, and what peft saves beside them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_adapters import make_adapter, run_with
from tiny_hf_models import randomized, relative_error, runner, text, transformers_logits
from transformers import LlamaConfig, LlamaForCausalLM

from plait.runtime.adapters.load import open_adapter
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.errors import InputError
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=97)
NAMES = ["", "outer", "biased", "outer"]


@pytest.fixture(params=[False, True], ids=["untied", "tied"], scope="module")
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    model = randomized(LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, tie_word_embeddings=request.param, **SIZES)))
    model.save_pretrained(folder / "base")
    outer = make_adapter(model, folder / "outer", 1, target_modules=["lm_head", "embed_tokens", "q_proj"])
    biased = make_adapter(model, folder / "biased", 2, target_modules=["lm_head", "v_proj"], lora_bias=True)
    return SimpleNamespace(folder=folder, references={"": model, "outer": outer, "biased": biased})


@pytest.fixture(params=[("bf16", "float32"), ("int8", "bfloat16")], ids=["torch", "packed"])
def ours(request, saved):
    weights, dtype = request.param
    adapters = {name: str(saved.folder / name) for name in saved.references if name}
    return runner(saved.folder / "base", weights=weights, dtype=dtype, max_pages=300, adapters=adapters)


def hidden_of(ours, names):
    """The hidden states of one token each of rows with these adapters, in one step."""
    batch, digests = Batch(1000), {"": "", **ours.adapter_pool.names}
    for row, name in enumerate(names):
        seq = Sequence(CacheNamespace(adapter=digests[name]), text(9, row))
        seq.pages.extend(np.arange(9 * row, 9 * row + 9, dtype=np.int32))
        batch.add(Request(None, seq, 0, 8), 0, 9)
    return ours.forward(batch)


def test_logits_are_those_of_peft(saved, ours):
    for name, reference in saved.references.items():
        (logits,) = run_with(ours, [(text(20, 0), range(20), 0, 20, 0, name)])
        expected = transformers_logits(reference, text(20, 0))
        if logits.dtype == torch.float32 and ours.__class__.__name__ == "TorchRunner":
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert relative_error(logits, expected) < 0.05


def test_some_logits_and_the_largest_one_are_those_of_all(ours):
    """Of rows with and without adapters of the head."""
    hidden = hidden_of(ours, NAMES)
    everything = torch.as_tensor(ours.logits(hidden, {})).clone()
    maxima, tokens = ours.argmax_tokens(hidden)
    assert tokens == everything.argmax(-1).tolist()
    assert maxima == pytest.approx(everything.max(-1).values.tolist())
    ids = np.array([3, 40, 96])
    some = torch.as_tensor(ours.logits(hidden, {1: ids, 2: ids}))
    for row, expected in enumerate(everything):
        columns = slice(None) if row in (0, 3) else ids
        torch.testing.assert_close(some[row, columns], expected[columns], atol=1e-5, rtol=1e-5)
        assert row in (0, 3) or some[row].isfinite().sum() == len(ids)


def test_a_step_after_one_with_adapters_has_none(saved, ours):
    """What the head adds is that of the latest batch."""
    hidden_of(ours, NAMES)
    plain = ours.logits(hidden_of(ours, ["", ""]), {})
    expected = [transformers_logits(saved.references[""], text(9, row))[-1] for row in (0, 1)]
    assert relative_error(torch.as_tensor(plain), torch.stack(expected)) < 0.05


@pytest.mark.parametrize(
    ("fields", "tensors", "phrase"),
    [
        ({"modules_to_save": ["lm_head"]}, {"lm_head.weight": (97, 64)}, r"modules_to_save=\['lm_head'\]"),
        ({}, {"lm_head.base_layer.weight": (99, 64)}, r"another model: its .*lm_head.base_layer.weight is \[99, 64\]"),
        ({}, {"lm_head.lora_A.weight": (4, 60)}, "its lm_head has 60 inputs"),
        ({}, {"model.embed_tokens.lora_embedding_A": (4, 99)}, "its model.embed_tokens has 99 inputs"),
        ({}, {"model.norm.weight": (64,)}, "model.norm.weight"),
    ],
)
def test_what_fits_another_model_is_named(saved, tmp_path, fields, tensors, phrase):
    described = json.loads((saved.folder / "outer" / "adapter_config.json").read_text()) | fields
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    arrays = load_file(saved.folder / "outer" / "adapter_model.safetensors")
    arrays |= {f"base_model.model.{name}": np.ones(shape, np.float32) for name, shape in tensors.items()}
    save_file(arrays, tmp_path / "adapter_model.safetensors")
    config = open_checkpoint(saved.folder / "base").config
    with pytest.raises(InputError, match=phrase):
        open_adapter("mine", tmp_path, config, expected_shapes(config))
