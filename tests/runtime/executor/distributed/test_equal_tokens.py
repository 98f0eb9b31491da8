"""Two tensor-parallel ranks give the tokens of one process, in every family."""

import pytest
import torch
from family_cases import FAMILY_CASES
from rank_runs import VOCAB, assert_same_logits, assert_same_tokens, rank_group, rank_runner, single_runner
from tiny_hf_models import all_hidden_states, all_logits, randomized, text, write_gguf


@pytest.fixture(scope="module")
def ranks():
    with rank_group(2) as ranks:
        yield ranks
        assert ranks.losses == []


@pytest.mark.parametrize("family", sorted(FAMILY_CASES))
def test_tokens_are_those_of_one_process(ranks, family, folder, expected):
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
def test_logits_are_those_of_one_process(ranks, family, variant, folder):
    assert_same_logits(ranks, family, variant, folder)


@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_0"])
def test_gguf_files_give_the_logits_of_one_process(ranks, quantization, tmp_path):
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


def test_bfloat16_weights(ranks, folder):
    tokens = text(24, seed=3, vocab_size=VOCAB)
    alone = all_logits(single_runner(folder("llama"), max_pages=90, dtype="bfloat16"), tokens)
    together = all_logits(rank_runner(ranks, folder("llama"), max_pages=90, dtype="bfloat16"), tokens)
    assert torch.allclose(alone, together, atol=0.3), (alone - together).abs().max()
