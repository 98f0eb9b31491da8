"""Constrained generation: masks, forced tokens, and matchers that fail."""

from __future__ import annotations

import gc

import pytest
from fake_engine import (
    assert_no_used_pages,
    generate,
    greedy,
    make_engine_loop,
    run_until_idle,
    spell,
    text_of,
)
from scripted_matchers import ForcingMatcher, OptionalTextMatcher, SlowMatcher, TextMatcher, UnstartableGrammar

from plait.constrained import GrammarError, Regex
from plait.runtime.messages import Append, Generate, Open
from plait.runtime.sampling_params import sampling_params


def test_masks_are_applied_and_a_raising_matcher_fails_only_its_call():
    text = spell("JSON")
    grammars = {
        Regex("good"): TextMatcher(text),
        Regex("bad"): TextMatcher(text, raises_at=2),
        Regex("none"): TextMatcher(text, empty_at=2),
    }
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    requests = []
    for i, name in enumerate(("good", "bad", "none")):
        requests += [Open(i), Append(i, [1]), Generate(i, i, sampling_params(max_tokens=20), Regex(name))]
    calls = run_until_idle(engine_loop, transport, *requests, Open(9), Append(9, [1, 2]), generate(9, 9, 6))
    assert calls[0].tokens == text
    assert calls[0].end.reason == "stop"
    assert calls[1].end.kind == calls[2].end.kind == "constraint"
    assert "broken inside" in calls[1].end.text
    assert calls[9].tokens == greedy([1, 2], 6)
    assert_no_used_pages(engine_loop)


def test_a_refused_grammar_fails_only_its_call():
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("("): GrammarError("unbalanced", 0)})
    request = Generate(1, 1, sampling_params(max_tokens=3), Regex("("))
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1]), request, Open(2), Append(2, [1]), generate(2, 2, 3)
    )
    assert calls[1].end.kind == "constraint"
    assert "unbalanced" in calls[1].end.text
    assert calls[2].tokens == greedy([1], 3)


def test_a_matcher_that_cannot_start_fails_only_its_call():
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("x"): UnstartableGrammar()})
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1]),
        Generate(1, 1, sampling_params(), Regex("x")),
        Open(2),
        Append(2, [1]),
        generate(2, 2, 3),
    )
    assert calls[1].end.kind == "constraint"
    assert calls[2].tokens == greedy([1], 3)


def test_an_empty_mask_with_top_k_fails_only_its_call():
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("none"): TextMatcher(spell("ab"), empty_at=1)})
    params = sampling_params(max_tokens=5, top_k=5, temperature=1.0)
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), Generate(1, 1, params, Regex("none")),
                  Open(2), Append(2, [1]), generate(2, 2, 6))  # fmt: skip
    assert calls[1].end.kind == "constraint"
    assert calls[2].tokens == greedy([1], 6)


@pytest.mark.parametrize("slow_in", ["mask", "accept"])
def test_a_slow_matcher_fails_only_its_call(slow_in):
    text = spell("JSON")
    engine_loop, transport, _ = make_engine_loop(
        grammars={Regex("slow"): SlowMatcher(text, slow_in), Regex("good"): TextMatcher(text)}
    )
    requests = [
        r
        for i, name in enumerate(("slow", "good"))
        for r in (Open(i), Append(i, [1]), Generate(i, i, sampling_params(max_tokens=20), Regex(name)))
    ]
    calls = run_until_idle(engine_loop, transport, *requests)
    assert calls[0].end.kind == "constraint"
    assert "one token of this constraint took" in calls[0].end.text
    assert calls[1].tokens == text
    assert_no_used_pages(engine_loop)


def test_garbage_collections_do_not_count_as_a_slow_constraint():
    text = spell("JSON")
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("slow"): SlowMatcher(text, "collection")})
    assert gc.isenabled()
    request = Generate(1, 1, sampling_params(max_tokens=20), Regex("slow"))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), request)
    assert calls[1].tokens == text
    assert gc.isenabled()


def test_eos_is_not_sampled_if_nothing_else_is_allowed():
    text = spell("JSON")
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("good"): TextMatcher(text)})
    request = Generate(1, 1, sampling_params(max_tokens=20, min_tokens=8), Regex("good"))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), request)
    assert calls[1].tokens == text
    assert calls[1].end.usage.completion_tokens == len(text)


def test_min_tokens_suppresses_eos_until_the_constraint_is_complete():
    text = spell("ab")
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("optional"): OptionalTextMatcher(text)})
    request = Generate(1, 1, sampling_params(max_tokens=20, min_tokens=2), Regex("optional"))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), request)
    assert calls[1].tokens == text


@pytest.mark.parametrize("runs", [{}, {0: 3}, {2: 2}, {0: 2, 3: 4, 8: 1}, {0: 9}])
def test_forced_tokens_save_steps_and_do_not_change_the_output(runs):
    text = spell("name JSON")
    engine_loop, transport, runner = make_engine_loop(grammars={Regex("g"): ForcingMatcher(text, runs)})
    request = Generate(1, 1, sampling_params(max_tokens=20), Regex("g"))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2]), request, generate(1, 2, 4))
    assert calls[1].tokens == text
    assert calls[1].end.usage.completion_tokens == len(text)
    assert calls[1].end.usage.forced_tokens == sum(runs.values())
    assert calls[2].tokens == greedy([1, 2, *text], 4)
    sampled_alone = {frozenset({}): 9}.get(frozenset(runs), 9 - sum(runs.values()))
    assert len([b for b in runner.batches if b]) <= sampled_alone + 6


def test_forced_tokens_stop_at_max_tokens_and_at_stop_strings():
    text = spell("name JSON")
    grammars = {Regex("g"): ForcingMatcher(text, {0: 9})}
    engine_loop, transport, _ = make_engine_loop(grammars=grammars)
    calls = run_until_idle(
        engine_loop, transport,
        Open(1), Append(1, [1]), Generate(1, 1, sampling_params(max_tokens=4), Regex("g")),
        Open(2), Append(2, [1]), Generate(2, 2, sampling_params(max_tokens=20, stop=[" J"]), Regex("g")),
        generate(2, 3, 3),
        Open(4), Append(4, [1]), Generate(4, 4, sampling_params(max_tokens=20, logprobs=True), Regex("g")),
    )  # fmt: skip
    assert (text_of(calls[1].tokens), calls[1].end.reason) == ("name", "length")
    assert (calls[1].end.usage.completion_tokens, calls[1].end.usage.forced_tokens) == (4, 4)
    assert (text_of(calls[2].tokens), calls[2].end.matched) == ("name", " J")
    assert calls[2].end.usage.forced_tokens == len(spell("name J"))  # no more than what was looked at
    assert calls[3].tokens == greedy([1, *spell("name")], 3)
    assert (calls[4].end.usage.forced_tokens, len(calls[4].logprobs)) == (0, 9)
    assert_no_used_pages(engine_loop)
