"""Draft tokens do not change the output, for any drafts and any size of the page pool."""

from __future__ import annotations

import math
import random

import pytest
from fake_engine import LETTERS, greedy, make_engine_loop, run_until_idle, spell
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.batch.ngram_proposer import (
    NgramProposer,
)
from plait.runtime.messages import Append, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy.drafts import DRAFT_TOKEN_COST, MAX_DRAFT_TOKEN_COST, MAX_DRAFTING_TOKENS

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=30)


def make_oracle(error_rate, seed):
    """A `propose` that drafts what the model will choose, with a share of wrong tokens."""
    rng = random.Random(seed)

    def propose(self, tokens, max_draft, token_cost, first_token_cost, cooldown_steps):
        truth = greedy(tokens.tolist(), min(max_draft, rng.randint(0, 6)), ignore_eos=True)
        return [rng.randint(0, 3) if rng.random() < error_rate else token for token in truth]

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
def test_outputs_with_drafts_equal_those_without(work, batch_tokens, rows, pages, error_rate, seed):
    outcomes = []
    for prompt_lookup in (False, True):
        engine_loop, transport, _ = make_engine_loop(
            pages=pages, batch_tokens=batch_tokens, rows=rows, prompt_lookup=prompt_lookup
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
            patch.setattr(NgramProposer, "propose", make_oracle(error_rate, seed))
            calls = run_until_idle(engine_loop, transport, *requests)
        outcomes.append({i: (call.tokens, call.end.reason, call.end.matched) for i, call in calls.items()})
        drafted = sum(call.end.usage.drafted_tokens for call in calls.values())
        assert prompt_lookup or not drafted
        for call in calls.values():
            assert call.end.usage.completion_tokens - len(call.tokens) in (0, 1) or call.end.matched
            assert call.end.usage.drafted_tokens <= call.end.usage.completion_tokens
        free, cached, used = engine_loop.cache.counts()
        assert (used, free + cached) == (0, engine_loop.cache.pool.total)
    assert outcomes[0] == outcomes[1]


def correct_draft(self, tokens, max_draft, *budget):
    return greedy(tokens.tolist(), min(max_draft, 9), True)


def test_accepted_drafts_save_steps():
    engine_loop, transport, runner = make_engine_loop()
    request = Generate(1, 1, sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", correct_draft)
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), request)
    assert calls[1].tokens == greedy([1, 2, 3], 40, ignore_eos=True)
    assert len(runner.batches) == 5  # the prompt gives one token, then ten at a time
    assert calls[1].end.usage.drafted_tokens == 35


def test_a_failed_step_leaves_no_draft_in_the_text():
    engine_loop, transport, runner = make_engine_loop()
    runner.fail_when = lambda batch: batch.num_draft_tokens > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", lambda self, *budget: spell("abc"))
        request = Generate(1, 1, sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True))
        calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2, 3]), request)
    assert calls[1].tokens == greedy([1, 2, 3], 40, ignore_eos=True)


def test_requests_share_the_draft_tokens_of_a_step_equally():
    arguments = []

    def propose(self, tokens, max_draft, token_cost, first_token_cost, cooldown_steps):
        arguments.append((max_draft, first_token_cost, token_cost, cooldown_steps))
        return greedy(tokens.tolist(), max_draft, True)

    engine_loop, transport, _ = make_engine_loop(rows=4)
    requests = []
    for i in range(4):
        params = sampling_params(max_tokens=200, temperature=0.0, ignore_eos=True)
        requests += [Open(i), Append(i, [i + 1, 2, 3]), Generate(i, i, params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", propose)
        run_until_idle(engine_loop, transport, *requests)
    assert [max_draft for max_draft, *_ in arguments[:8]] == [(MAX_DRAFTING_TOKENS - 4) // 4] * 8
    assert [first_token_cost for _, first_token_cost, *_ in arguments[:4]] == [2 * DRAFT_TOKEN_COST * 1.75, 0, 0, 0]
    assert {tuple(rest) for _, _, *rest in arguments[:8]} == {(2 * DRAFT_TOKEN_COST, 2)}


@pytest.mark.parametrize("num_rows", [17, 18, MAX_DRAFTING_TOKENS])
def test_large_batches_do_not_draft(num_rows):
    arguments = []
    engine_loop, transport, _ = make_engine_loop(rows=num_rows, pages=4096, batch_tokens=256)
    requests = []
    for i in range(num_rows):
        params = sampling_params(max_tokens=9, temperature=0.0, ignore_eos=True)
        requests += [Open(i), Append(i, [i + 1, 2, 3]), Generate(i, i, params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", lambda self, *budget: arguments.append(budget) or [])
        run_until_idle(engine_loop, transport, *requests)
    assert bool(arguments) == (DRAFT_TOKEN_COST * math.sqrt(num_rows) < MAX_DRAFT_TOKEN_COST) == (num_rows < 18)
