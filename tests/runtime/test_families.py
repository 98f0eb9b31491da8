"""Every family against transformers' on tiny random checkpoints: whole, chunked, cached, batched; float32, 1e-4."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from plait.runtime.config import engine_config
from plait.runtime.model_runner import ModelRunner
from plait.runtime.scheduler.rows import Batch, Row
from plait.runtime.scheduler.sequence import Sequence

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
    """(transformers' model, our runner) on one checkpoint with weights large enough to matter."""
    torch.manual_seed(7)
    model = MODELS[request.param]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name
            middle = float(norm and not isinstance(model, Gemma3ForCausalLM))  # Gemma's norms multiply by 1 + weight
            parameter.copy_(torch.randn_like(parameter) * (0.3 if norm else 0.15) + middle)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    config = engine_config(device="cpu", dtype="float32", max_pages=256, max_batch_tokens=128)
    return SimpleNamespace(theirs=model, ours=ModelRunner(config, folder))


def run(runner, rows):
    """rows: (tokens, pages, start, count, logits from). Logits of each, [num_logits, V]."""
    batch = Batch(10_000)
    for tokens, pages, start, count, logits_from in rows:
        seq = Sequence(("", ""), tokens)
        seq.pages.extend(np.array(pages[: start + count], dtype=np.int32))
        batch.add(Row(None, seq, 0, logits_from), start, count)
    logits = runner.logits(runner.forward(batch), {})
    ends = list(itertools.accumulate((each.num_logits for each in batch.rows), initial=0))
    return [logits[a:b] for a, b in itertools.pairwise(ends)]


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def text(length, seed):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def test_prefill_equals_transformers(pair):
    tokens = text(60, 0)
    (ours,) = run(pair.ours, [(tokens, range(60), 0, 60, 0)])
    torch.testing.assert_close(ours, their_logits(pair.theirs, tokens), atol=1e-4, rtol=1e-4)


def test_chunks_and_decode_equal_transformers(pair):
    tokens, pages = text(40, 1), np.random.default_rng(2).permutation(256)
    expected = their_logits(pair.theirs, tokens)
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
        expected.append(their_logits(pair.theirs, tokens)[-1:])
    for ours, theirs in zip(run(pair.ours, rows), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_row_may_read_what_its_neighbour_writes_in_the_same_step(pair):
    """What `PrefixCache.publish_early` relies on."""
    prefix, tail = text(20, 4), text(5, 5)
    tokens = prefix + tail
    rows = [(prefix, range(20), 0, 20, 19), (tokens, range(25), 20, 5, 24)]
    together = run(pair.ours, rows)[1]
    torch.testing.assert_close(together, their_logits(pair.theirs, tokens)[-1:], atol=1e-4, rtol=1e-4)
