"""Two stages of two tensor-parallel ranks, and three stages, give the tokens of one process."""

import pytest
from family_cases import FAMILY_CASES
from rank_runs import assert_same_logits, assert_same_tokens, rank_group


@pytest.fixture(scope="class")
def ranks(request):
    with rank_group(request.cls.size) as ranks:
        yield ranks
        assert ranks.losses == []


class TestTwoStagesOfTwoRanks:
    size = 4

    @pytest.mark.parametrize("family", ["qwen3_moe"])
    def test_tokens_are_those_of_one_process(self, ranks, family, folder, expected):
        assert_same_tokens(ranks, family, folder, expected, stages=2)

    @pytest.mark.parametrize("family", sorted(FAMILY_CASES))
    def test_logits_are_those_of_one_process(self, ranks, family, folder):
        assert_same_logits(ranks, family, "", folder, stages=2)


class TestThreeStages:
    size = 3

    def test_tokens_are_those_of_one_process(self, ranks, folder, expected):
        """The middle one receives and sends; this variant has three layers."""
        assert_same_tokens(ranks, "llama", folder, expected, stages=3, variant="MHA, untied, biases")
