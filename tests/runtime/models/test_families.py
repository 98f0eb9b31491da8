"""Every family against transformers' on tiny random checkpoints: whole, chunked, cached, batched; float32, 1e-4."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_hf_models import all_hidden_states, all_logits, randomized, run, runner, text, transformers_logits, write_gguf
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from plait.runtime.errors import InputError
from plait.runtime.models.decoders import MODELS as DECODERS
from plait.runtime.models.registry import FAMILIES, config_from_gguf
from plait.runtime.weights.checkpoint import open_checkpoint

SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=128)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
QWEN3 = SHAPE | HEADS | dict(head_dim=24)
GEMMA = SHAPE | HEADS | dict(head_dim=32, query_pre_attn_scalar=20, sliding_window=7, pad_token_id=0)
EXPERTS = QWEN3 | dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40)
WINDOW = dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)
PHI3 = SHAPE | HEADS | dict(sliding_window=11, pad_token_id=0, eos_token_id=1)
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
}


def model(kind, settings, **more):
    return lambda: kind(kind.config_class(**settings, **more))


MODELS = {
    "Llama, GQA, tied": model(LlamaForCausalLM, SHAPE | HEADS, tie_word_embeddings=True, rope_parameters=ROPE),
    "Llama, MHA, untied, biases": model(
        LlamaForCausalLM, SHAPE, num_attention_heads=4, num_key_value_heads=4, attention_bias=True, mlp_bias=True
    ),
    "Llama, wide heads, linear rope": model(
        LlamaForCausalLM, SHAPE, num_attention_heads=4, num_key_value_heads=1, head_dim=32, rope_parameters=LINEAR
    ),
    "Llama, llama3 rope": model(
        LlamaForCausalLM, SHAPE, num_attention_heads=2, num_key_value_heads=1, rope_parameters=LLAMA3
    ),
    "Mistral, sliding window": model(MistralForCausalLM, SHAPE | HEADS, sliding_window=7),
    "Qwen 2": model(Qwen2ForCausalLM, SHAPE | HEADS, tie_word_embeddings=True),
    "Qwen 2, window above, YaRN": model(Qwen2ForCausalLM, SHAPE | HEADS | WINDOW, rope_parameters=YARN),
    "Qwen 3": model(Qwen3ForCausalLM, QWEN3, tie_word_embeddings=True),
    "Qwen 3, biases, window, YaRN": model(
        Qwen3ForCausalLM, QWEN3 | WINDOW, attention_bias=True, rope_parameters=YARN | {"attention_factor": 1.3}
    ),
    "Qwen 3, experts": model(Qwen3MoeForCausalLM, EXPERTS, norm_topk_prob=True),
    "Qwen 3, experts in some layers": model(
        Qwen3MoeForCausalLM, EXPERTS | dict(num_hidden_layers=5), decoder_sparse_step=2, mlp_only_layers=[1]
    ),
    "Gemma 3": model(Gemma3ForCausalLM, GEMMA | dict(num_hidden_layers=7)),
    "Gemma 3, layers named, two bases, untied": model(
        Gemma3ForCausalLM,
        GEMMA,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=TWO_BASES,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    "Phi-3": model(Phi3ForCausalLM, PHI3),
    "Phi-3, LongRoPE, short": model(
        Phi3ForCausalLM, PHI3, rope_parameters=LONGROPE | {"factor": 3.0}, original_max_position_embeddings=128
    ),
    "Phi-3, a part of each head turns": model(
        Phi3ForCausalLM, PHI3 | dict(tie_word_embeddings=True), rope_parameters=ROPE | {"partial_rotary_factor": 0.75}
    ),
}


@pytest.fixture(params=MODELS, scope="module")
def pair(request, tmp_path_factory):
    """(transformers' model, our runner) on one checkpoint."""
    model = randomized(MODELS[request.param]())
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return SimpleNamespace(theirs=model, ours=runner(folder))


def test_prefill_equals_transformers(pair):
    tokens = text(60, 0)
    (ours,) = run(pair.ours, [(tokens, range(60), 0, 60, 0)])
    torch.testing.assert_close(ours, transformers_logits(pair.theirs, tokens), atol=1e-4, rtol=1e-4)


def test_chunks_and_decode_equal_transformers(pair):
    tokens, pages = text(40, 1), np.random.default_rng(2).permutation(256)
    expected = transformers_logits(pair.theirs, tokens)
    at = 0
    for count in (9, 1, 13, 1, 1, 15):
        (ours,) = run(pair.ours, [(tokens, pages, at, count, at)])
        torch.testing.assert_close(ours, expected[at : at + count], atol=1e-4, rtol=1e-4)
        at += count


def test_a_ragged_batch_over_a_shared_prefix_equals_transformers(pair):
    prefix, free = text(20, 3), iter(range(20, 256))
    run(pair.ours, [(prefix, range(20), 0, 20, 19)])
    rows, expected = [], []
    for seed, length in enumerate((1, 2, 7, 30)):
        tokens = prefix + text(length, 10 + seed)
        pages = [*range(20), *itertools.islice(free, length)]
        rows.append((tokens, pages, 20, length, len(tokens) - 1))
        expected.append(transformers_logits(pair.theirs, tokens)[-1:])
    for ours, theirs in zip(run(pair.ours, rows), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_row_may_read_what_its_neighbour_writes_in_the_same_step(pair):
    """What `PrefixCache.publish_early` relies on."""
    prefix, tail = text(20, 4), text(5, 5)
    tokens = prefix + tail
    rows = [(prefix, range(20), 0, 20, 19), (tokens, range(25), 20, 5, 24)]
    together = run(pair.ours, rows)[1]
    torch.testing.assert_close(together, transformers_logits(pair.theirs, tokens)[-1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["Llama, GQA, tied", "Mistral, sliding window", "Qwen 2", "Qwen 3", "Qwen 3, experts", "Gemma 3", "Phi-3"],
)
def test_a_model_saved_without_its_output_head_has_the_states_of_transformers(name, tmp_path):
    """As models that embed texts are: another class, shorter names."""
    model = randomized(MODELS[name]())
    model.model.save_pretrained(tmp_path)
    tokens = text(60, 0)
    with torch.no_grad():
        expected = model.model(torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(all_hidden_states(runner(tmp_path), tokens), expected, atol=1e-4, rtol=1e-4)


# What GGUF cannot say: windows of Qwen (llama.cpp has none), layers without experts, other patterns of Gemma's.
IN_GGUF = [
    "Llama, GQA, tied",
    "Llama, MHA, untied, biases",
    "Llama, wide heads, linear rope",
    "Mistral, sliding window",
    "Qwen 2",
    "Qwen 3",
    "Qwen 3, experts",
    "Gemma 3",
    "Phi-3",
    "Phi-3, LongRoPE, short",
    "Phi-3, a part of each head turns",
]


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_of_each_family_equals_transformers(name, tmp_path):
    model = randomized(MODELS[name]())
    write_gguf(model, tmp_path / "m.gguf")
    tokens = text(60, 0)
    ours = all_logits(runner(tmp_path / "m.gguf"), tokens)
    torch.testing.assert_close(ours, transformers_logits(model, tokens), atol=1e-4, rtol=1e-4)


def test_yarn_in_a_gguf(tmp_path):
    model = randomized(Qwen2ForCausalLM(Qwen2ForCausalLM.config_class(**SHAPE, **HEADS, rope_parameters=YARN)))
    write_gguf(model, tmp_path / "m.gguf")
    tokens = text(60, 0)
    ours = all_logits(runner(tmp_path / "m.gguf"), tokens)
    torch.testing.assert_close(ours, transformers_logits(model, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_longrope_takes_the_set_of_the_longest_text_it_will_see(container, tmp_path):
    settings = PHI3 | dict(original_max_position_embeddings=32, rope_parameters=LONGROPE)
    model = randomized(Phi3ForCausalLM(Phi3ForCausalLM.config_class(**settings)))
    path = tmp_path if container == "safetensors" else tmp_path / "m.gguf"
    model.save_pretrained(path) if container == "safetensors" else write_gguf(model, path)
    long, short = text(60, 0), text(30, 1)
    ours = runner(path)
    torch.testing.assert_close(all_logits(ours, long), transformers_logits(model, long), atol=1e-4, rtol=1e-4)
    # In chunks too, the first of which is short: what is cached fits what comes.
    run(ours, [(long, range(60), 0, 20, 19)])
    (rest,) = run(ours, [(long, range(60), 20, 40, 20)])
    torch.testing.assert_close(rest, transformers_logits(model, long)[20:], atol=1e-4, rtol=1e-4)
    limited = runner(path, context_length=32)
    torch.testing.assert_close(all_logits(limited, short), transformers_logits(model, short), atol=1e-4, rtol=1e-4)


def test_gemmas_list_of_local_layers_in_a_gguf(tmp_path):
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    model = randomized(Gemma3ForCausalLM(Gemma3ForCausalLM.config_class(**GEMMA | dict(layer_types=kinds))))
    write_gguf(model, tmp_path / "m.gguf")
    metadata = dict(open_checkpoint(tmp_path / "m.gguf").file.metadata)
    pattern = "gemma3.attention.sliding_window_pattern"
    assert config_from_gguf(metadata).sliding_layers == (True,) * 3  # every sixth is not
    assert config_from_gguf(metadata | {pattern: 2}).sliding_layers == (True, False, True)
    assert config_from_gguf(metadata | {pattern: np.array([False, True, True])}).sliding_layers == (False, True, True)


def test_gemma_refuses_float16(tmp_path):
    randomized(MODELS["Gemma 3"]()).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="float16"):
        runner(tmp_path, dtype="float16")


@pytest.mark.parametrize("name", ["Qwen 3, experts", "Gemma 3", "Phi-3"])
def test_bfloat16_stays_near_float32(name, tmp_path):
    """Where a norm or a weight is rounded shows in the size of the error."""
    model = randomized(MODELS[name]())
    model.save_pretrained(tmp_path)
    tokens = text(40, 2)
    exact = transformers_logits(model, tokens)
    ours = all_logits(runner(tmp_path, dtype="bfloat16"), tokens)
    theirs = transformers_logits(model.to(torch.bfloat16), tokens).float()
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm() + 1e-3


@pytest.mark.parametrize("name", ["Qwen 3, experts", "Gemma 3"])
def test_deterministic_bits_do_not_depend_on_company(name, tmp_path):
    randomized(MODELS[name]()).save_pretrained(tmp_path)
    ours = runner(tmp_path, deterministic=True)
    tokens, other = text(30, 5), text(25, 6)
    alone = all_logits(ours, tokens)
    pages, others = range(30), range(100, 125)
    run(ours, [(tokens, pages, 0, 11, 10), (other, others, 0, 25, 24)])
    (pieces, _) = run(ours, [(tokens, pages, 11, 19, 11), (other, others, 0, 25, 24)])
    assert torch.equal(pieces, alone[11:])


def test_every_family_has_its_models_here():
    assert {type(build()).__name__ for build in MODELS.values()} == {family.hf for family in FAMILIES}
    assert DECODERS.keys() == {family.name for family in FAMILIES}
