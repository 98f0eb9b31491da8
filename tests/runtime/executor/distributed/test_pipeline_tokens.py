"""Two stages, and two stages of two ranks, give the tokens of one process, in every family."""

import pytest
from family_cases import FAMILY_CASES
from rank_runs import assert_same_tokens, rank_group


@pytest.fixture(scope="module")
def ranks():
    with rank_group(2) as ranks:
        yield ranks
        assert ranks.losses == []


@pytest.mark.parametrize("family", sorted(FAMILY_CASES))
def test_tokens_are_those_of_one_process(ranks, family, folder, expected):
    assert_same_tokens(ranks, family, folder, expected, stages=2)
