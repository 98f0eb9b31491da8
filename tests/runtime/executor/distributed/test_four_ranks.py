"""Four ranks, more than there are KV heads, give the tokens of one process."""

import pytest
from rank_runs import assert_same_logits, assert_same_tokens, rank_group


@pytest.fixture(scope="module")
def ranks():
    with rank_group(4) as ranks:
        yield ranks
        assert ranks.losses == []


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tokens_are_those_of_one_process(ranks, family, folder, expected):
    assert_same_tokens(ranks, family, folder, expected)


@pytest.mark.parametrize("variant", ["MHA, untied, biases", "wide heads, linear rope"])
def test_logits_are_those_of_one_process(ranks, variant, folder):
    assert_same_logits(ranks, "llama", variant, folder)
