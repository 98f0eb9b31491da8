"""Guessed tokens change no text: against runs without guesses, whatever is guessed, in any pool."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from fake_engine import LETTERS, greedy, make_engine_loop, run_until_idle, spell
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.runtime.batch.ngram_proposer import (
    MAX_DRAFT_TOKENS,
    MAX_NGRAM,
    PRIOR_ACCEPTANCE,
    NgramProposer,
    find_ngram_match,
)
from plait.runtime.messages import Append, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.batching import DRAFT_TOKEN_COST, MAX_DRAFT_TOKEN_COST, MAX_DRAFTING_TOKENS

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=30)


# Ids whose bytes look like other ids' when they are read at the wrong place.
ids = st.sampled_from([0, 1, 256, 65536, 1 << 24])


@given(st.lists(st.integers(0, 2), max_size=60) | st.lists(ids, max_size=40))
@example([1, 65536, 1, 65536])
@example([256, 0, 1, 256, 0])
def test_a_place_is_the_latest_of_those_with_the_longest_match(tokens):
    wanted = 0, 0
    for at in range(1, len(tokens)):
        length = 0
        while length < min(at, MAX_NGRAM) and tokens[at - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length and length >= wanted[1]:
            wanted = at, length
    assert find_ngram_match(np.array(tokens, dtype=np.int32)) == wanted


def test_a_place_too_far_back_is_not_found(monkeypatch):
    monkeypatch.setattr("plait.runtime.batch.ngram_proposer.WINDOW", 20)
    tokens = np.array([7, 8, *range(10, 27), 8], dtype=np.int32)
    assert find_ngram_match(tokens) == (2, 1)
    assert find_ngram_match(np.insert(tokens, 10, [1, 2])) == (0, 0)
    assert find_ngram_match(np.insert(tokens, 0, [1, 2])) == (4, 1)


def learn_from(lookup, tokens, token_cost, rounds, share_right):
    sizes = []
    for _ in range(rounds):
        sizes.append(len(lookup.propose(tokens, 99, token_cost, token_cost)))
        if sizes[-1]:
            lookup.record_outcome(sizes[-1], int(share_right * sizes[-1]))
    return sizes


def test_guesses_grow_while_they_are_right_and_cease_while_they_are_wrong():
    tokens = np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    lookup = NgramProposer()
    sizes = learn_from(lookup, tokens, 0.3, 30, 1)
    assert 0 < sizes[0] < 10 and sizes[-1] == MAX_DRAFT_TOKENS
    tries = learn_from(lookup, tokens, 0.3, 400, 0)
    assert sum(map(bool, tries[:20])) < 20 and sum(map(bool, tries)) < 60
    tries = learn_from(lookup, tokens, 0.3, 400, 1)  # it comes back
    assert tries[-1] == MAX_DRAFT_TOKENS


def test_fewer_are_guessed_where_each_costs_more():
    tokens = np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    sizes = [
        len(NgramProposer().propose(tokens, 99, token_cost, token_cost)) for token_cost in (0.05, 0.12, 0.2, 0.3, 0.6)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > 0 == sizes[-1]
    assert len(NgramProposer().propose(tokens, 99, 0.3, 0.0)) > len(NgramProposer().propose(tokens, 99, 0.3, 0.9)) == 0


def test_a_guess_behind_others_is_judged_by_a_longer_match():
    tokens = np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    chances = np.cumprod([*PRIOR_ACCEPTANCE[2:], *[PRIOR_ACCEPTANCE[-1]] * 20])
    assert len(NgramProposer().propose(tokens, 99, 0.12, 0.0)) == (chances >= 0.12).sum()


def test_a_text_made_to_look_like_its_bytes_shifted_ends_the_search():
    tokens = np.array([*[3, 512] * 5000, 0], dtype=np.int32)  # no 0 before, and ten thousand places that look like it
    assert find_ngram_match(tokens) == (0, 0)
    assert find_ngram_match(np.insert(tokens, -5, 0)) == (9997, 5)


def test_guesses_of_what_goes_round_go_round():
    tokens = np.array([5, *[1, 2, 3] * 4], dtype=np.int32)
    assert NgramProposer().propose(tokens, 8, 0.01, 0.0) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_it_pauses_where_it_found_nothing_worth_guessing():
    lookup = NgramProposer()
    assert lookup.propose(np.arange(9, dtype=np.int32), 9, 0.1, 0.1, cooldown_steps=2) == []
    assert [lookup.is_due() for _ in range(4)] == [False, False, True, True]
    tokens = np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    assert lookup.propose(tokens, 9, 0.1, 0.1, cooldown_steps=2)
    assert lookup.is_due()


def oracle(engine_loop, wrong, seed):
    """Makes every generation guess what the model will say, but for a share of the tokens."""
    rng = random.Random(seed)

    def propose(self, tokens, max_draft, token_cost, first_token_cost, cooldown_steps):
        truth = greedy(tokens.tolist(), min(max_draft, rng.randint(0, 6)), ignore_eos=True)
        return [rng.randint(0, 3) if rng.random() < wrong else token for token in truth]

    return propose


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 25), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(64, 200),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 999),
)
def test_any_guesses_give_what_no_guesses_give(work, batch_tokens, rows, pages, wrong, seed):
    outcomes = []
    for lookup in (False, True):
        engine_loop, transport, _ = make_engine_loop(
            pages=pages, batch_tokens=batch_tokens, rows=rows, prompt_lookup=lookup
        )
        requests = []
        for i, (prompt, n, is_greedy, stops) in enumerate(work):
            params = sampling_params(
                max_tokens=n,
                temperature=0.0 if is_greedy else 0.8,
                seed=i,
                top_p=0.9,
                stop=("ab", "cc", LETTERS[7]) if stops else (),
                ignore_eos=not stops,
            )
            requests += [Open(i), Append(i, prompt), Generate(i, i, params), Append(i, [2, 1])]
            requests.append(Generate(i, 100 + i, sampling_params(max_tokens=4, temperature=0.0)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NgramProposer, "propose", oracle(engine_loop, wrong, seed))
            calls = run_until_idle(engine_loop, transport, *requests)
        outcomes.append({i: (call.tokens, call.end.reason, call.end.matched) for i, call in calls.items()})
        drafted = sum(call.end.usage.drafted_tokens for call in calls.values())
        assert lookup or not drafted
        for call in calls.values():
            assert call.end.usage.completion_tokens - len(call.tokens) in (0, 1) or call.end.matched
            assert call.end.usage.drafted_tokens <= call.end.usage.completion_tokens
        free, cached, held = engine_loop.cache.counts()
        assert (held, free + cached) == (0, engine_loop.cache.pool.total)
    assert outcomes[0] == outcomes[1]


def right_guesses(self, tokens, max_draft, *budget):
    return greedy(tokens.tolist(), min(max_draft, 9), True)


def test_right_guesses_save_steps():
    engine_loop, transport, runner = make_engine_loop()
    request = Generate(1, 1, sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", right_guesses)
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), request)
    assert calls[1].tokens == greedy([1, 2, 3], 40, ignore_eos=True)
    assert len(runner.batches) == 5  # the prompt gives one token, then ten at a time
    assert calls[1].end.usage.drafted_tokens == 35


def test_a_step_that_breaks_leaves_no_guesses_in_the_text():
    engine_loop, transport, runner = make_engine_loop()
    runner.fail_when = lambda batch: batch.num_draft_tokens > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", lambda self, *budget: spell("abc"))
        request = Generate(1, 1, sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True))
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), request)
    assert calls[1].end.kind == "internal"
    assert calls[1].tokens == greedy([1, 2, 3], 40, ignore_eos=True)[: len(calls[1].tokens)]


def test_rows_share_the_room_for_guesses_and_the_last_gets_as_much_as_the_first():
    asked = []

    def propose(self, tokens, max_draft, token_cost, first_token_cost, cooldown_steps):
        asked.append((max_draft, first_token_cost, token_cost, cooldown_steps))
        return greedy(tokens.tolist(), max_draft, True)

    engine_loop, transport, _ = make_engine_loop(rows=4)
    requests = []
    for i in range(4):
        params = sampling_params(max_tokens=200, temperature=0.0, ignore_eos=True)
        requests += [Open(i), Append(i, [i + 1, 2, 3]), Generate(i, i, params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", propose)
        run_until_idle(engine_loop, transport, *requests)
    assert [max_draft for max_draft, *_ in asked[:8]] == [(MAX_DRAFTING_TOKENS - 4) // 4] * 8
    assert [first_token_cost for _, first_token_cost, *_ in asked[:4]] == [2 * DRAFT_TOKEN_COST * 1.75, 0, 0, 0]
    assert {tuple(rest) for _, _, *rest in asked[:8]} == {(2 * DRAFT_TOKEN_COST, 2)}


@pytest.mark.parametrize("num_rows", [17, 18, MAX_DRAFTING_TOKENS])
def test_many_rows_are_not_asked_to_guess(num_rows):
    asked = []
    engine_loop, transport, _ = make_engine_loop(rows=num_rows, pages=4096, batch_tokens=256)
    requests = []
    for i in range(num_rows):
        params = sampling_params(max_tokens=9, temperature=0.0, ignore_eos=True)
        requests += [Open(i), Append(i, [i + 1, 2, 3]), Generate(i, i, params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", lambda self, *budget: asked.append(budget) or [])
        run_until_idle(engine_loop, transport, *requests)
    assert bool(asked) == (DRAFT_TOKEN_COST * math.sqrt(num_rows) < MAX_DRAFT_TOKEN_COST) == (num_rows < 18)
