"""`complete`: constrained values are complete within any token budget, and unchanged if the budget is large enough."""

from __future__ import annotations

import functools
import re

import pytest
from fake_engine import (
    assert_no_used_pages,
    logits_after,
    make_engine_loop,
    run_until_idle,
    spell,
    state_of,
    text_of,
    vocabulary,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained import Lark, Regex, Structural
from plait.constrained.compiler import build_grammar, compile_spec
from plait.runtime.errors import InputError
from plait.runtime.messages import Append, Failed, Finished, Generate, Open
from plait.runtime.sampling_params import sampling_params

VOCABULARY = vocabulary()
NESTED = "a(a|b)*(c(d){3}){0,4}"
PATTERNS = {
    Regex("[a-c]+x"): "[a-c]+x",
    Regex("(ab|cd){2,9}e"): "(ab|cd){2,9}e",
    Regex("hello( world[0-9]+z)?"): "hello( world[0-9]+z)?",
    Regex(NESTED): NESTED,
    Regex("[a-z]*"): "[a-z]*",
}
BRACKETS = Lark('start: "x" start "b" | "a" /[d-w]{2}/')


@functools.cache
def grammar(spec):
    return build_grammar(compile_spec(spec, VOCABULARY), VOCABULARY)


def call(spec, number, **fields):
    return Generate(number, number, sampling_params(**fields), spec)


def run(requests, **settings):
    grammars = {request.constraint: grammar(request.constraint) for request in requests}
    engine_loop, transport, _ = make_engine_loop(grammars=grammars, **settings)
    opened = [message for request in requests for message in (Open(request.session), Append(request.session, [1, 2]))]
    calls = run_until_idle(engine_loop, transport, *opened, *requests)
    assert_no_used_pages(engine_loop)
    return calls


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(PATTERNS)), st.integers(0, 40), st.integers(0, 2**20), st.sampled_from([0.0, 1.0, 5.0])
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.integers(90, 400),
)
def test_a_value_is_complete_or_the_call_fails(work, logprobs, pages):
    requests = [
        call(spec, i, max_tokens=n, seed=seed, temperature=temperature, complete=True, logprobs=logprobs)
        for i, (spec, n, seed, temperature) in enumerate(work)
    ]
    calls = run(requests, pages=pages, rows=4, batch_tokens=16)
    for i, (spec, n, _, _) in enumerate(work):
        shortest = grammar(spec).matcher().completion(1000)
        end, text = calls[i].end, text_of(calls[i].tokens)
        if len(shortest) > n:
            assert isinstance(end, Failed) and end.kind == "value_does_not_fit" and f"fits into {n} tokens" in end.text
            continue
        if n == 0:
            continue
        assert isinstance(end, Finished) and end.reason == "stop"
        assert re.fullmatch(PATTERNS[spec], text), text
        assert len(calls[i].tokens) <= n
        assert end.usage.completion_tokens - len(text) in (0, 1)  # the end token, if it was sampled
        if logprobs:
            assert len(calls[i].logprobs) == end.usage.completion_tokens
            assert end.usage.forced_tokens == 0


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*PATTERNS, BRACKETS]), st.integers(0, 2**20))
def test_a_large_budget_leaves_the_output_unchanged(spec, seed):
    plain = run([call(spec, 1, max_tokens=300, seed=seed)], pages=2000)[1]
    if plain.end.reason == "length":
        return
    complete = run([call(spec, 1, max_tokens=300, seed=seed, complete=True)], pages=2000)[1]
    assert complete.tokens == plain.tokens
    assert complete.end.usage.forced_tokens == plain.end.usage.forced_tokens


def test_the_completion_plan_is_followed_as_late_as_possible():
    """Greedy over [a-c]+x with 12 tokens: eleven that the model chooses, then the x."""
    spec = Regex("[a-c]+x")
    tokens = [1, 2]
    while len(tokens) < 13:
        logits = logits_after(state_of(tokens))
        allowed = spell("abc") if len(tokens) == 2 else spell("abcx")
        tokens.append(max(allowed, key=lambda token: float(logits[token])))
    end = tokens.index(spell("x")[0]) + 1 if spell("x")[0] in tokens else None
    expected = tokens[2:end] if end else [*tokens[2:], *spell("x")]
    assert run([call(spec, 1, max_tokens=12, temperature=0.0, complete=True)])[1].tokens == expected


def test_nested_brackets_are_closed_in_time():
    bias = {spell("x")[0]: 100.0}  # the model would open brackets forever
    for n in range(3, 24):
        calls = run([call(BRACKETS, 1, max_tokens=n, complete=True, logit_bias=bias, temperature=0.0)])
        text = text_of(calls[1].tokens)
        depth = (n - 3) // 2
        assert re.fullmatch("x" * depth + "a[d-w]{2}" + "b" * depth, text), (n, text)
        assert calls[1].end.reason == "stop"


def test_the_context_length_limits_the_value_too():
    calls = run([call(Regex("[a-z]{5,}x"), 1, max_tokens=500, complete=True)], context=20)
    assert re.fullmatch("[a-z]{5,}x", text_of(calls[1].tokens))
    assert len(calls[1].tokens) <= 18


def test_without_complete_a_cut_value_has_reason_length():
    bias = {spell("a")[0]: 100.0}
    calls = run([call(Regex("[a-c]+x"), 1, max_tokens=6, logit_bias=bias)])
    assert (calls[1].end.reason, text_of(calls[1].tokens)) == ("length", "aaaaaa")


@pytest.mark.parametrize("logprobs", [False, True])
def test_if_it_fits_gives_stop_for_complete_values_and_length_for_cut_ones(logprobs):
    fields = dict(complete=True, if_it_fits=True, logit_bias={spell("a")[0]: 100.0}, logprobs=logprobs)
    complete = run([call(Regex("[a-z]*"), 1, max_tokens=5, **fields)])[1]
    assert (complete.end.reason, text_of(complete.tokens)) == ("stop", "aaaaa")
    cut = run([call(Regex("[a-c]{2,}x"), 1, max_tokens=2, **fields)])[1]
    assert (cut.end.reason, text_of(cut.tokens)) == ("length", "aa")


def test_free_text_that_fills_the_budget_has_reason_length():
    spec = Structural([("<f>", {"type": "integer"}, "<e>")])
    engine_loop, transport, _ = make_engine_loop(grammars={spec: grammar(Regex("[a-z]*"))})
    sampling = sampling_params(max_tokens=5, complete=True, if_it_fits=True, logit_bias={spell("a")[0]: 100.0})
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2]), Generate(1, 1, sampling, spec))
    assert (calls[1].end.reason, text_of(calls[1].tokens)) == ("length", "aaaaa")


def test_complete_requires_a_constraint_and_excludes_stop_strings():
    with pytest.raises(InputError, match="complete cannot be combined with stop"):
        sampling_params(complete=True, stop="x")
    with pytest.raises(InputError, match="complete must be True or False"):
        sampling_params(complete="yes")
    engine_loop, transport, _ = make_engine_loop()
    free = Generate(1, 1, sampling_params(complete=True))
    calls = run_until_idle(engine_loop, transport, Open(1), Append(1, [1]), free)
    assert (calls[1].end.kind, "complete needs a constraint" in calls[1].end.text) == ("invalid", True)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*PATTERNS, BRACKETS]), st.integers(1, 40), st.booleans())
def test_forced_tokens_equal_those_sampled_one_by_one(spec, n, complete):
    fields = dict(max_tokens=n, temperature=0.0, complete=complete)
    jumping = run([call(spec, 1, **fields)])[1]
    stepping = run([call(spec, 1, logprobs=True, **fields)])[1]  # with logprobs every token is sampled
    assert stepping.tokens == jumping.tokens
    if isinstance(jumping.end, Finished):
        assert stepping.end.usage.forced_tokens == 0
        assert stepping.end.reason == jumping.end.reason
