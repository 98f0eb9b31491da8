"""Two and four ranks give the tokens of one process, in every family."""

import pytest
import torch
from family_cases import FAMILY_CASES
from rank_runs import VOCAB, rank_group, rank_runner, run_calls, single_runner
from tiny_hf_models import all_hidden_states, all_logits, randomized, text, write_gguf

TWO_LAYERS = {family: {"num_hidden_layers": 2} for family in FAMILY_CASES}
TWO_LAYERS["gemma3"]["layer_types"] = ["sliding_attention", "full_attention"]
PAGES = 50  # too few for all calls at once


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ranks(request):
    with rank_group(request.param) as ranks:
        yield ranks
        assert ranks.losses == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`folder(family, variant)`: a tiny random model of it, saved once."""
    saved = {}

    def save(family, variant=""):
        if (family, variant) not in saved:
            saved[family, variant] = tmp_path_factory.mktemp("model")
            changes = dict(vocab_size=VOCAB, max_position_embeddings=256)
            model = randomized(FAMILY_CASES[family].build(variant, **changes | ({} if variant else TWO_LAYERS[family])))
            model.save_pretrained(saved[family, variant])
        return saved[family, variant]

    return save


@pytest.fixture(scope="module")
def expected(folder):
    """`expected(family)`: what `run_calls` returns in one process."""
    outcomes = {}

    def run(family):
        if family not in outcomes:
            runner = single_runner(folder(family), max_pages=PAGES)
            outcomes[family] = run_calls(runner)
        return outcomes[family]

    return run


@pytest.mark.parametrize("family", sorted(FAMILY_CASES))
def test_tokens_are_those_of_one_process(ranks, family, folder, expected):
    """With greedy and sampled calls, constraints, forks, drafts from the prompt, and a pool that is too small."""
    alone, (retractions, drafts) = expected(family)
    assert retractions > 0 and drafts > 0
    together, _ = run_calls(rank_runner(ranks, folder(family), max_pages=PAGES))
    assert {call: outcome.tokens for call, outcome in together.items()} == {
        call: outcome.tokens for call, outcome in alone.items()
    }
    for token, ours in zip(alone[13].logprobs, together[13].logprobs, strict=True):
        assert ours.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in token.top]


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "MHA, untied, biases"),  # biases of row-parallel layers, which one rank adds
        ("llama", "wide heads, linear rope"),  # one KV head
        ("qwen3", "biases, window, YaRN"),
        ("qwen3_moe", "experts in some layers"),
        ("gemma3", "layer types, two rope bases, untied"),
        ("phi3", "partial rotation"),
    ],
)
def test_logits_are_those_of_one_process(ranks, family, variant, folder):
    tokens = text(24, seed=3, vocab_size=VOCAB)
    alone = all_logits(single_runner(folder(family, variant), max_pages=90), tokens)
    together = all_logits(rank_runner(ranks, folder(family, variant), max_pages=90), tokens)
    assert torch.allclose(alone, together, atol=1e-4), (alone - together).abs().max()


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
