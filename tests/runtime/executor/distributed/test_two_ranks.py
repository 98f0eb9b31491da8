"""Two ranks, as parts of every layer or as two stages, give the tokens of one process in every family.

Stages also give the same bits where their products are those of one process.
"""

import os
import signal

import pytest
import torch
from example_share import sample_of
from family_cases import FAMILY_CASES
from rank_runs import (
    VOCAB,
    assert_same_logits,
    assert_same_tokens,
    cut_at_random,
    rank_group,
    rank_runner,
    single_runner,
)
from tiny_hf_models import all_hidden_states, all_logits, randomized, run, text, write_gguf

from plait.runtime.executor.distributed import rank_runner as rank_runner_module
from plait.runtime.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def ranks():
    """The processes serve all tests of this file: a process takes seconds to start."""
    with rank_group(2) as ranks:
        yield ranks
        assert ranks.losses == []


@pytest.mark.parametrize("family", sample_of(sorted(FAMILY_CASES), least=4))
def test_tokens_of_tensor_parallelism_are_those_of_one_process(ranks, family, folder, expected):
    assert_same_tokens(ranks, family, folder, expected)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "MHA, untied, biases"),  # biases of row-parallel layers, which one rank adds
        ("llama", "wide heads, linear rope"),  # one KV head
        ("qwen3", "biases, window, YaRN"),
        ("qwen3_moe", "experts in some layers"),
        ("gemma2", "layer types, untied, biases, no caps"),
        ("gemma3", "layer types, two rope bases, untied"),
        ("phi3", "partial rotation"),
        ("olmo2", "one KV head, tied, biases"),  # norms over the heads of all ranks, one of them held twice
    ],
)
def test_logits_of_tensor_parallelism_are_those_of_one_process(ranks, family, variant, folder):
    assert_same_logits(ranks, family, variant, folder)


@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_0"])
def test_tensor_parallel_gguf_files_give_the_logits_of_one_process(ranks, quantization, tmp_path):
    """Rows of q and k are permuted in the file, and blocks of 32 inputs end where the ranks' parts do not."""
    model = randomized(FAMILY_CASES["llama"].build(vocab_size=VOCAB, intermediate_size=160))
    write_gguf(model, tmp_path / "model.gguf", quantization)
    tokens = text(24, seed=4, vocab_size=VOCAB)
    alone = all_logits(single_runner(tmp_path / "model.gguf", max_pages=90), tokens)
    together = all_logits(rank_runner(ranks, tmp_path / "model.gguf", max_pages=90), tokens)
    assert torch.allclose(alone, together, atol=1e-4), (alone - together).abs().max()


def test_the_largest_logit_is_the_first_of_equal_ones(ranks, tmp_path):
    model = randomized(FAMILY_CASES["llama"].build(vocab_size=VOCAB))
    with torch.no_grad():
        model.model.embed_tokens.weight[5:] = model.model.embed_tokens.weight[5]  # tied: equal logits in all ranks
    model.save_pretrained(tmp_path)
    runner = rank_runner(ranks, tmp_path, max_pages=90)
    hidden = all_hidden_states(runner, [1, 2, 3, 9])
    logits = runner.logits(hidden, {})
    peaks, tokens = runner.argmax_tokens(hidden)
    assert tokens == logits.argmax(-1).tolist() and max(tokens) <= 5
    assert peaks == logits.max(-1).values.tolist()


def test_a_text_has_the_same_bits_beside_other_rows(ranks, folder):
    """With `deterministic`, sums are in the order of the ranks; gloo's depends on the number of values."""
    runner = rank_runner(ranks, folder("llama"), max_pages=90, deterministic=True)
    tokens = text(40, seed=5, vocab_size=VOCAB)
    assert torch.equal(all_logits(runner, tokens)[:1], all_logits(runner, tokens[:1]))


def test_tensor_parallel_bfloat16_weights(ranks, folder):
    tokens = text(24, seed=3, vocab_size=VOCAB)
    alone = all_logits(single_runner(folder("llama"), max_pages=90, dtype="bfloat16"), tokens)
    together = all_logits(rank_runner(ranks, folder("llama"), max_pages=90, dtype="bfloat16"), tokens)
    assert torch.allclose(alone, together, atol=0.3), (alone - together).abs().max()


@pytest.mark.parametrize("family", sample_of(sorted(FAMILY_CASES), least=4))
def test_tokens_of_two_stages_are_those_of_one_process(ranks, family, folder, expected):
    assert_same_tokens(ranks, family, folder, expected, stages=2)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *((family, "") for family in sorted(FAMILY_CASES)),
        ("llama", "MHA, untied, biases"),
        ("qwen3", "biases, window, YaRN"),
        ("qwen3_moe", "experts in some layers"),
        ("gemma2", "layer types, untied, biases, no caps"),
        ("gemma3", "layer types, two rope bases, untied"),
        ("phi3", "partial rotation"),
        ("olmo2", "one KV head, tied, biases"),
    ],
)
def test_logits_of_two_stages_have_the_bits_of_one_process(ranks, family, variant, folder):
    """Where the step is one micro-batch: products of other numbers of rows have other sums."""
    tokens = text(24, seed=3, vocab_size=VOCAB)
    alone = all_logits(single_runner(folder(family, variant), max_pages=90), tokens)
    together = all_logits(rank_runner(ranks, folder(family, variant), 2, max_pages=90), tokens)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_deterministic_micro_batches_have_the_bits_of_one_process(ranks, family, folder):
    settings = dict(max_pages=200, deterministic=True)
    tokens = text(150, seed=5, vocab_size=VOCAB)
    runner = rank_runner(ranks, folder(family), 2, **settings)
    numbers = cut_at_random(runner)
    alone = all_logits(single_runner(folder(family), **settings), tokens)
    for _ in range(4):
        assert torch.equal(all_logits(runner, tokens), alone)
    assert max(numbers) > 2


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0"])
def test_two_stages_of_gguf_files_give_the_logits_of_one_process(ranks, quantization, tmp_path):
    model = randomized(FAMILY_CASES["llama"].build(vocab_size=VOCAB, intermediate_size=160))
    write_gguf(model, tmp_path / "model.gguf", quantization)
    tokens = text(24, seed=4, vocab_size=VOCAB)
    alone = all_logits(single_runner(tmp_path / "model.gguf", max_pages=90), tokens)
    assert torch.equal(all_logits(rank_runner(ranks, tmp_path / "model.gguf", 2, max_pages=90), tokens), alone)


def test_hidden_states_of_two_stages_and_bfloat16(ranks, folder):
    tokens = text(24, seed=3, vocab_size=VOCAB)
    settings = dict(max_pages=90, dtype="bfloat16")
    alone, together = single_runner(folder("qwen2"), **settings), rank_runner(ranks, folder("qwen2"), 2, **settings)
    assert torch.equal(all_hidden_states(together, tokens), all_hidden_states(alone, tokens))
    hidden = all_hidden_states(together, tokens).bfloat16()
    peaks, best = together.argmax_tokens(hidden)
    logits = together.logits(hidden, {})
    assert best == logits.argmax(-1).tolist() and peaks == logits.max(-1).values.tolist()


def test_long_prompts_are_divided(ranks, folder, monkeypatch):
    """32 tokens of arithmetic are counted for reading the weights: sqrt(150 / 32) micro-batches."""
    runner = rank_runner(ranks, folder("llama"), 2, max_pages=200)
    sent, send = [], ranks.send
    monkeypatch.setattr(ranks, "send", lambda message: (sent.append(message), send(message)))
    tokens = text(150, seed=6, vocab_size=VOCAB)
    logits = all_logits(runner, tokens)
    assert sent[0].ends == [64, 150]
    assert torch.allclose(logits, all_logits(single_runner(folder("llama"), max_pages=200), tokens), atol=1e-4)


def test_steps_without_outputs_are_not_waited_for(ranks, folder):
    """A stage works on the next prompt chunk while the stage behind it is still at the one before."""
    runner = rank_runner(ranks, folder("llama"), 2, max_pages=90)
    expected = all_logits(runner, range(40))
    (process,) = ranks.processes
    os.kill(process.pid, signal.SIGSTOP)
    try:
        pages = list(range(40))
        for start in (0, 10, 20):
            (nothing,) = run(runner, [(pages[: start + 10], pages, start, 10, 40)])
            assert len(nothing) == 0
    finally:
        os.kill(process.pid, signal.SIGCONT)
    (logits,) = run(runner, [(pages, pages, 30, 10, 0)])
    assert torch.allclose(logits, expected[30:], atol=1e-4)


@pytest.mark.parametrize("variant", ["", "MHA, untied, biases"])
def test_a_stage_reads_and_holds_only_its_layers(ranks, folder, variant, monkeypatch):
    read = []

    def recorded(path, rank):
        checkpoint = open_checkpoint(path)
        load = checkpoint.tensor
        checkpoint.tensor = lambda name, *where: (read.append(name), load(name, *where))[1]
        return checkpoint

    monkeypatch.setattr(rank_runner_module, "open_rank_checkpoint", recorded)
    runner = rank_runner(ranks, folder("llama", variant), 2, max_pages=90)
    layers = runner.model.stage.layers
    assert 0 < len(layers) < runner.config.num_layers
    assert {int(name.split(".")[2]) for name in read if ".layers." in name} == set(layers)
    assert "model.embed_tokens.weight" in read
    assert "lm_head.weight" not in read and "model.norm.weight" not in read
    assert len(runner.kv_cache) == len(runner.model.layers) == len(layers)
