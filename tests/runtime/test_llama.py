"""Our Llama against transformers' on tiny random checkpoints: whole, chunked, cached, batched; float32, 1e-4."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from plait.runtime.config import engine_config
from plait.runtime.model_runner import ModelRunner
from plait.runtime.scheduler.rows import Batch, Row
from plait.runtime.scheduler.sequence import Sequence

SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=128)
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "GQA, tied": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters=ROPE,
        )
    ),
    "MHA, untied, biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=4, attention_bias=True, mlp_bias=True)
    ),
    "wide heads, linear rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=1, head_dim=32, rope_parameters=LINEAR)
    ),
    "llama3 rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_attention_heads=2, num_key_value_heads=1, rope_parameters=LLAMA3)
    ),
    "Mistral, sliding window": lambda: MistralForCausalLM(
        MistralConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, sliding_window=7)
    ),
}


@pytest.fixture(params=MODELS, scope="module")
def pair(request, tmp_path_factory):
    """(transformers' model, our runner) on one checkpoint with weights large enough to matter."""
    torch.manual_seed(7)
    model = MODELS[request.param]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if "norm" in name else 0.15) + ("norm" in name))
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
