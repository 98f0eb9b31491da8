"""Select: scores, replaced tokens, shared prefixes and usage."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import (
    assert_no_used_pages,
    generate,
    greedy,
    logprob,
    make_engine_loop,
    post,
    run_until_idle,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.messages import Abort, Append, Fork, Open, Select

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(
    prompts,
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=6, unique_by=tuple),
)
def test_select_scores_as_published(prompt, choices):
    engine_loop, transport, _ = make_engine_loop()
    methods = ("token_length_normalized", "unconditional_likelihood_normalized", "greedy_token_selection")
    requests = []
    for i, method in enumerate(methods):
        requests += [Open(i), Append(i, prompt), Select(i, i, choices, method), generate(i, 10 + i, 3)]
    calls = run_until_idle(engine_loop, transport, *requests)
    given_prompt = [[logprob(prompt + c[:j], c[j]) for j in range(len(c))] for c in choices]
    unconditional = [[logprob([prompt[0]] + c[:j], c[j]) for j in range(len(c))] for c in choices]
    plain = [float(np.mean(p)) for p in given_prompt]
    minus = [float(np.mean(np.subtract(p, q))) for p, q in zip(given_prompt, unconditional, strict=True)]
    assert calls[0].end.choice.scores == pytest.approx(plain, abs=1e-5)
    assert calls[1].end.choice.scores == pytest.approx(minus, abs=1e-5)
    for i, row in enumerate(given_prompt):
        assert calls[0].end.choice.token_logprobs[i] == pytest.approx(row, abs=1e-5)
    left, position = list(range(len(choices))), 0
    longest = max(map(len, choices))
    padded = [p + [float(np.mean(p))] * (longest - len(p)) for p in given_prompt]
    while len(left) > 1 and position < longest:
        best = max(padded[i][position] for i in left)
        left = [i for i in left if padded[i][position] > best - 1e-6]
        position += 1
    assert calls[2].end.choice.index in left
    for i in range(3):
        winner = choices[calls[i].end.choice.index]
        assert calls[i].tokens == winner
        assert calls[10 + i].tokens == greedy(prompt + winner, 3), "the winner is part of the text"
    assert_no_used_pages(engine_loop)


def test_a_select_may_replace_tokens_before_it():
    """In a full context and after computed text. Replaced tokens do not count against the context and stay cached."""
    engine_loop, transport, runner = make_engine_loop(context=40, batch_tokens=64)
    prompt = [5] * 30 + [1, 2]
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), generate(1, 1, 8, ignore_eos=True),
                  Fork(1, [2]), Select(2, 2, [[3, 4], [6, 7]], replaced=2), generate(1, 3, 0))  # fmt: skip
    text = (prompt + greedy(prompt, 8, ignore_eos=True))[:38]
    scores = [logprob(text, c[0]) + logprob([*text, c[0]], c[1]) for c in ([3, 4], [6, 7])]
    assert calls[2].end.choice.scores == pytest.approx([score / 2 for score in scores], abs=1e-5)
    assert calls[2].end.usage.prompt_tokens == 38
    assert calls[3].end.usage.prompt_tokens == 40, "the other branch lost its text"
    assert runner.num_computed == 39 + 2 * 2 + 1, "what was cached was computed again"
    assert_no_used_pages(engine_loop)


def test_an_aborted_select_restores_the_replaced_text():
    engine_loop, transport, _ = make_engine_loop()
    post(transport, Open(1), Append(1, [1, 2, 3]), Select(1, 1, [[4], [5]], replaced=2))
    engine_loop.receive(0.0)
    calls = run_until_idle(engine_loop, transport, Abort(1, 1), generate(1, 2, 3))
    assert calls[1].end.kind == "aborted"
    assert calls[2].tokens == greedy([1, 2, 3], 3)
    assert_no_used_pages(engine_loop)


def test_choices_with_a_common_prefix_share_a_request():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64)
    choices = [[1], [2], [3], [1, 2], [1, 2, 3]]
    run_until_idle(engine_loop, transport, Open(1), Append(1, [5] * 10), Select(1, 1, choices))
    assert runner.num_computed == 10 + 2, "one row: the prompt and [1, 2]"


def test_the_usage_of_a_select_counts_its_prompt_once():
    engine_loop, transport, _ = make_engine_loop(batch_tokens=64)
    choices = [[a, b, 7] for a in (1, 2, 3) for b in (1, 2, 3)]
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [5] * 20), Select(1, 1, choices),
                  Open(2), Append(2, [5] * 20), Select(2, 2, choices))  # fmt: skip
    cold, warm = calls[1].end.usage, calls[2].end.usage
    assert (cold.prompt_tokens, cold.computed_tokens, cold.cached_tokens) == (20, 20, 0)
    assert (warm.prompt_tokens, warm.computed_tokens, warm.cached_tokens) == (20, 1, 19)
