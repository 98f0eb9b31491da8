"""Four ranks, as parts of every layer, as two stages of two and as four stages, give the tokens of one process."""

import pytest
from example_share import sample_of
from family_cases import FAMILY_CASES
from rank_runs import assert_same_logits, assert_same_tokens, rank_group


@pytest.fixture(scope="module")
def ranks():
    """The processes serve all tests of this file: a process takes seconds to start."""
    with rank_group(4) as ranks:
        yield ranks
        assert ranks.losses == []


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tokens_of_more_ranks_than_kv_heads(ranks, family, folder, expected):
    assert_same_tokens(ranks, family, folder, expected)


@pytest.mark.parametrize("variant", ["MHA, untied, biases", "wide heads, linear rope"])
def test_logits_of_more_ranks_than_kv_heads(ranks, variant, folder):
    assert_same_logits(ranks, "llama", variant, folder)


def test_tokens_of_two_stages_of_two_ranks(ranks, folder, expected):
    assert_same_tokens(ranks, "qwen3_moe", folder, expected, stages=2)


@pytest.mark.parametrize("family", sample_of(sorted(FAMILY_CASES), least=4))
def test_logits_of_two_stages_of_two_ranks(ranks, family, folder):
    assert_same_logits(ranks, family, "", folder, stages=2)


def test_tokens_of_four_stages(ranks, folder, expected):
    """Those in the middle receive and send; this variant has four layers."""
    assert_same_tokens(ranks, "llama", folder, expected, stages=4, variant="MHA, untied, biases")
