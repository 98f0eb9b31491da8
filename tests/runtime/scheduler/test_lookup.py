"""Guessed tokens change no text: against runs without guesses, whatever is guessed, in any pool."""

from __future__ import annotations

import random

import numpy as np
import pytest
from doubles import LETTERS, drive, greedy, make_scheduler, spell
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.messages import Append, Generate, Open
from plait.runtime.sampling import sampling_params
from plait.runtime.scheduler.lookup import NGRAM, PromptLookup, find_continuation

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=30)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 9))
def test_a_continuation_is_what_followed_the_latest_place(tokens, most):
    wanted: list[int] = []
    last = tokens[-NGRAM:]
    for at in range(len(tokens) - NGRAM - 1, -1, -1):
        if len(last) == NGRAM and tokens[at : at + NGRAM] == last:
            wanted = tokens[at + NGRAM : at + NGRAM + most]
            break
    assert find_continuation(np.array(tokens, dtype=np.int32), most) == wanted


def test_guesses_grow_while_they_are_right_and_pause_while_they_are_wrong():
    lookup, tokens = PromptLookup(), np.array([7, 8, 9, *range(40), 7, 8, 9], dtype=np.int32)
    sizes = []
    for _ in range(5):
        sizes.append(len(lookup.guess(tokens, 99)))
        lookup.learn(sizes[-1], sizes[-1])
    assert sizes == sorted(sizes) and sizes[-1] == 16
    tried = 0
    for _ in range(400):
        guess = lookup.guess(tokens, 99)
        if guess:
            tried += 1
            lookup.learn(len(guess), 0)
    assert tried < 16


def oracle(scheduler, wrong, seed):
    """Makes every generation guess what the model will say, but for a share of the tokens."""
    rng = random.Random(seed)

    def guess(self, tokens, most):
        truth = greedy(tokens.tolist(), min(most, rng.randint(0, 6)), ignore_eos=True)
        return [rng.randint(0, 3) if rng.random() < wrong else token for token in truth]

    return guess


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
        scheduler, link, _ = make_scheduler(pages=pages, batch_tokens=batch_tokens, rows=rows, prompt_lookup=lookup)
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
            patch.setattr(PromptLookup, "guess", oracle(scheduler, wrong, seed))
            calls = drive(scheduler, link, *requests)
        outcomes.append({i: (call.tokens, call.end.reason, call.end.matched) for i, call in calls.items()})
        drafted = sum(call.end.usage.drafted_tokens for call in calls.values())
        assert lookup or not drafted
        for call in calls.values():
            assert call.end.usage.completion_tokens - len(call.tokens) in (0, 1) or call.end.matched
            assert call.end.usage.drafted_tokens <= call.end.usage.completion_tokens
        free, cached, held = scheduler.cache.counts()
        assert (held, free + cached) == (0, scheduler.cache.pool.total)
    assert outcomes[0] == outcomes[1]


def test_right_guesses_save_steps():
    scheduler, link, runner = make_scheduler()
    request = Generate(1, 1, sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "guess", lambda self, tokens, most: greedy(tokens.tolist(), min(most, 9), True))
        calls = drive(scheduler, link, Open(1), Append(1, [1, 2, 3]), request)
    assert calls[1].tokens == greedy([1, 2, 3], 40, ignore_eos=True)
    assert len(runner.batches) == 5  # the prompt gives one token, then ten at a time
    assert calls[1].end.usage.drafted_tokens == 35


def test_a_step_that_breaks_leaves_no_guesses_in_the_text():
    scheduler, link, runner = make_scheduler()
    runner.explode_when = lambda batch: batch.num_drafts > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "guess", lambda self, tokens, most: spell("abc"))
        request = Generate(1, 1, sampling_params(max_tokens=40, temperature=0.0, ignore_eos=True))
        calls = drive(scheduler, link, Open(1), Append(1, [1, 2, 3]), request)
    assert calls[1].end.kind == "internal"
    assert calls[1].tokens == greedy([1, 2, 3], 40, ignore_eos=True)[: len(calls[1].tokens)]
