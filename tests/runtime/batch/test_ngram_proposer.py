"""The n-gram proposer: matches, draft lengths and cooldown."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from plait.runtime.batch import ngram_proposer
from plait.runtime.batch.ngram_proposer import (
    MAX_DRAFT_TOKENS,
    MAX_NGRAM,
    PRIOR_ACCEPTANCE,
    NgramProposer,
    find_ngram_match,
)

# Token ids whose bytes look like those of other ids at a misaligned offset.
ids = st.sampled_from([0, 1, 256, 65536, 1 << 24])


@given(st.lists(st.integers(0, 2), max_size=60) | st.lists(ids, max_size=40))
@example([1, 65536, 1, 65536])
@example([256, 0, 1, 256, 0])
def test_the_latest_of_the_longest_matches_is_found(tokens):
    expected = 0, 0
    for at in range(1, len(tokens)):
        length = 0
        while length < min(at, MAX_NGRAM) and tokens[at - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length and length >= expected[1]:
            expected = at, length
    assert find_ngram_match(np.array(tokens, dtype=np.int32)) == expected


def test_matches_beyond_the_lookback_are_not_found(monkeypatch):
    monkeypatch.setattr(ngram_proposer, "LOOKBACK_TOKENS", 20)
    tokens = np.array([7, 8, *range(10, 27), 8], dtype=np.int32)
    assert find_ngram_match(tokens) == (2, 1)
    assert find_ngram_match(np.insert(tokens, 10, [1, 2])) == (0, 0)
    assert find_ngram_match(np.insert(tokens, 0, [1, 2])) == (4, 1)


def learn_from(proposer, tokens, token_cost, rounds, acceptance_rate):
    sizes = []
    for _ in range(rounds):
        sizes.append(len(proposer.propose(tokens, 99, token_cost, token_cost)))
        if sizes[-1]:
            proposer.record_outcome(sizes[-1], int(acceptance_rate * sizes[-1]))
    return sizes


def test_drafts_grow_while_accepted_and_cease_while_rejected():
    tokens = np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    proposer = NgramProposer()
    sizes = learn_from(proposer, tokens, 0.3, 30, 1)
    assert 0 < sizes[0] < 10 and sizes[-1] == MAX_DRAFT_TOKENS
    sizes = learn_from(proposer, tokens, 0.3, 400, 0)
    assert sum(map(bool, sizes[:20])) < 20 and sum(map(bool, sizes)) < 60
    sizes = learn_from(proposer, tokens, 0.3, 400, 1)  # it recovers
    assert sizes[-1] == MAX_DRAFT_TOKENS


def test_drafts_are_shorter_at_a_higher_token_cost():
    tokens = np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    sizes = [
        len(NgramProposer().propose(tokens, 99, token_cost, token_cost)) for token_cost in (0.05, 0.12, 0.2, 0.3, 0.6)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > 0 == sizes[-1]
    assert len(NgramProposer().propose(tokens, 99, 0.3, 0.0)) > len(NgramProposer().propose(tokens, 99, 0.3, 0.9)) == 0


def test_later_draft_tokens_count_as_longer_matches():
    tokens = np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    chances = np.cumprod([*PRIOR_ACCEPTANCE[2:], *[PRIOR_ACCEPTANCE[-1]] * 20])
    assert len(NgramProposer().propose(tokens, 99, 0.12, 0.0)) == (chances >= 0.12).sum()


def test_the_search_gives_up_after_many_misaligned_matches():
    tokens = np.array(
        [*[3, 512] * 5000, 0], dtype=np.int32
    )  # no 0 before the last, and ten thousand misaligned matches
    assert find_ngram_match(tokens) == (0, 0)
    assert find_ngram_match(np.insert(tokens, -5, 0)) == (9997, 5)


def test_drafts_of_a_repetition_repeat():
    tokens = np.array([5, *[1, 2, 3] * 4], dtype=np.int32)
    assert NgramProposer().propose(tokens, 8, 0.01, 0.0) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_proposer_pauses_after_finding_no_draft():
    proposer = NgramProposer()
    assert proposer.propose(np.arange(9, dtype=np.int32), 9, 0.1, 0.1, cooldown_steps=2) == []
    assert [proposer.is_due() for _ in range(4)] == [False, False, True, True]
    tokens = np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    assert proposer.propose(tokens, 9, 0.1, 0.1, cooldown_steps=2)
    assert proposer.is_due()
