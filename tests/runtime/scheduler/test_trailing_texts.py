"""Values with known text behind them: where they end, what the client gets, and how the session goes on."""

from __future__ import annotations

import re
from functools import cache

import pytest
from fake_engine import (
    EOS,
    LETTERS,
    assert_no_used_pages,
    greedy,
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

from plait.constrained import Grammar, Regex
from plait.constrained.compiler import build_grammar, compile_spec
from plait.runtime.messages import Abort, Append, Generate, Open
from plait.runtime.sampling_params import sampling_params

PATTERNS = ["[0-9]{1,6}", "[0-4]{1,2}(?:X[0-9]{1,2})?", "[a-f ]{1,8}", "(?:a|ab|abc|0)"]
TEXTS = st.sampled_from([" a", "X", "a", "0 k", "X b", "c", " ", "abc ", "12"])
prompts = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@cache
def grammar(pattern: str) -> Grammar:
    own = vocabulary()
    return build_grammar(compile_spec(Regex(pattern), own), own)


def begins_value(pattern: str, text: str) -> bool:
    matcher = grammar(pattern).matcher()
    return all(matcher.accept(token) for token in spell(text))


def held(pattern: str, behind: str, written: str) -> int:
    """How many characters at the end of `written` may belong to the text behind the value."""
    sizes = range(min(len(behind), len(written)), 0, -1)
    starts = (size for size in sizes if behind.startswith(written[-size:]) and re.fullmatch(pattern, written[:-size]))
    return next(starts, 0)


def reference(prompt: list[int], pattern: str, behind: str, max_tokens: int) -> tuple[str, str, str]:
    """Greedy decoding that tries every token: (value, text behind it, finish reason)."""
    written = ""
    while True:
        is_complete = written.endswith(behind) and held(pattern, behind, written) >= len(behind)
        logits = logits_after(state_of(prompt + spell(written)))
        order = logits.argsort(descending=True).tolist()
        if is_complete:
            best = written + text_of(order[:1])
            is_continued = order[0] != EOS and (begins_value(pattern, best) or held(pattern, behind, best))
            may_continue = begins_value(pattern, written) and not re.fullmatch(pattern, written)
            if not may_continue or not is_continued:
                return written[: -len(behind)], behind, "stop"
        size = held(pattern, behind, written)
        if len(written) - size >= max_tokens:
            value = written[: len(written) - size][:max_tokens]
            can_go_on = any(begins_value(pattern, value + letter) for letter in LETTERS[:-1])
            is_whole = bool(size) or (re.fullmatch(pattern, value) and not can_go_on)
            return value, behind, "stop" if is_whole else "length"
        allowed = (token for token in order if token != EOS and is_viable(pattern, behind, written + text_of([token])))
        written += text_of([next(allowed)])


def is_viable(pattern: str, behind: str, written: str) -> bool:
    return begins_value(pattern, written) or bool(held(pattern, behind, written))


def run(prompt, pattern, behind, *, context=None, **params):
    engine_loop, transport, _ = make_engine_loop(context=context, grammars={Regex(pattern): grammar(pattern)})
    sampling = sampling_params(temperature=0.0, **params)
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, prompt),
        Generate(1, 1, sampling, Regex(pattern), behind),
        Generate(1, 2, sampling_params(temperature=0.0, max_tokens=5)),
    )
    assert_no_used_pages(engine_loop)
    return calls


@settings(max_examples=300, deadline=None)
@given(prompts, st.sampled_from(PATTERNS), TEXTS, st.integers(1, 8))
def test_a_value_ends_where_slow_reference_decoding_ends_it(prompt, pattern, behind, max_tokens):
    """The client gets the value alone, the session continues after the value and the text behind it."""
    value, following, reason = reference(prompt, pattern, behind, max_tokens)
    calls = run(prompt, pattern, behind, max_tokens=max_tokens)
    assert (text_of(calls[1].tokens), calls[1].end.reason, calls[1].end.matched) == (value, reason, None)
    assert calls[1].end.usage.completion_tokens == len(value) <= max_tokens
    assert calls[2].tokens == greedy(prompt + spell(value + following), 5)
    assert calls[2].end.usage.prompt_tokens == len(prompt) + len(value + following)


@settings(max_examples=150, deadline=None)
@given(prompts, st.sampled_from(PATTERNS), TEXTS, st.integers(2, 8))
def test_logprobs_and_completions_are_those_of_the_value(prompt, pattern, behind, max_tokens):
    plain = run(prompt, pattern, behind, max_tokens=max_tokens)
    scored = run(prompt, pattern, behind, max_tokens=max_tokens, logprobs=True)
    assert (scored[1].tokens, scored[1].end.reason) == (plain[1].tokens, plain[1].end.reason)
    assert [entry.token_id for entry in scored[1].logprobs] == scored[1].tokens
    for params in ({}, {"logprobs": True}):
        complete = run(prompt, pattern, behind, max_tokens=max_tokens, complete=True, **params)
        assert re.fullmatch(pattern, text_of(complete[1].tokens))
        assert complete[1].end.reason == "stop"
        assert len(complete[1].tokens) <= max_tokens
        assert complete[2].tokens == greedy(prompt + spell(text_of(complete[1].tokens) + behind), 5)


@settings(max_examples=150, deadline=None)
@given(prompts, st.sampled_from(PATTERNS), TEXTS, st.sampled_from(["a", "1", " ", "b c", "0X"]))
def test_a_stop_string_ends_the_value_and_is_not_searched_behind_it(prompt, pattern, behind, stop):
    value, _, reason = reference(prompt, pattern, behind, 8)
    calls = run(prompt, pattern, behind, max_tokens=8, stop=[stop])
    cut, found, _ = value.partition(stop)
    assert text_of(calls[1].tokens) == cut
    assert (calls[1].end.reason, calls[1].end.matched) == (("stop", stop) if found else (reason, None))
    assert calls[2].tokens == greedy(prompt + spell(cut + behind), 5)


@settings(max_examples=150, deadline=None)
@given(prompts, st.sampled_from(PATTERNS), TEXTS, st.sampled_from("a1 0Xc2"))
def test_a_stop_token_ends_the_value_and_not_the_text_behind_it(prompt, pattern, behind, stop):
    value, _, reason = reference(prompt, pattern, behind, 8)
    (token,) = spell(stop)
    calls = run(prompt, pattern, behind, max_tokens=8, stop_token_ids=[token])
    cut = text_of(calls[1].tokens)
    assert value.startswith(cut)
    assert stop not in cut or cut == value
    assert (calls[1].end.reason, calls[1].end.matched) in [("stop", token), (reason, None)]
    assert calls[2].tokens == greedy(prompt + spell(cut + behind), 5)


@settings(max_examples=60, deadline=None)
@given(prompts, st.sampled_from(PATTERNS), st.sampled_from(["abc ", " abc", "0 k"]), st.integers(0, 3))
def test_a_value_is_complete_where_the_context_ends_in_the_text_behind_it(prompt, pattern, behind, num_more):
    value, _, reason = reference(prompt, pattern, behind, 8)
    if reason == "length":
        return
    calls = run(prompt, pattern, behind, max_tokens=8, context=len(prompt) + len(value) + num_more)
    assert value.startswith(text_of(calls[1].tokens))
    assert calls[2].end.kind == "context_overflow"
    if num_more:
        assert (text_of(calls[1].tokens), calls[1].end.reason) == (value, "stop")


@pytest.mark.parametrize("is_queued", [True, False])
def test_the_text_behind_an_aborted_value_follows_nevertheless(is_queued):
    """The client has sent what comes after it already."""
    prompt, pattern = [1, 2], PATTERNS[0]
    engine_loop, transport, _ = make_engine_loop(grammars={Regex(pattern): grammar(pattern)})
    first = [Generate(1, 9, sampling_params(max_tokens=3, temperature=0.0))] if is_queued else []
    sampling = sampling_params(temperature=0.0, max_tokens=6)
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, prompt),
        *first,
        Generate(1, 1, sampling, Regex(pattern), " legs"),
        Abort(1, 1),
        Append(1, spell(" and")),
        Generate(1, 2, sampling_params(temperature=0.0, max_tokens=5)),
    )
    assert calls[1].end.kind == "aborted"
    before = prompt + (calls[9].tokens if is_queued else [])
    assert calls[2].tokens == greedy(before + spell(" legs and"), 5)


def test_a_value_of_no_tokens_is_followed_by_the_text():
    calls = run([1, 2], PATTERNS[0], " legs", max_tokens=0)
    assert (calls[1].tokens, calls[1].end.reason) == ([], "length")
    assert calls[2].tokens == greedy([1, 2, *spell(" legs")], 5)


@pytest.mark.parametrize(
    ("sampling", "constraint", "behind"),
    [
        (sampling_params(), None, " legs"),
        (sampling_params(min_tokens=1, max_tokens=4), Regex("[0-9]+"), " legs"),
        (sampling_params(), Regex("[0-9]+"), "x" * 257),
    ],
)
def test_a_text_behind_a_value_that_cannot_belong_to_it_is_refused(sampling, constraint, behind):
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("[0-9]+"): grammar("[0-9]{1,6}")})
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1]), Generate(1, 1, sampling, constraint, behind)
    )
    assert calls[1].end.kind == "invalid"
    assert "trailing_text" in calls[1].end.text


def test_a_stop_token_where_the_value_may_have_ended():
    """After "3X" the value goes on with a digit, and this digit is a stop token: the value is "3"."""
    pattern, searched = PATTERNS[1], ([a, b] for a in range(1, 40) for b in range(1, 40))
    prompt, value = next(
        (prompt, value)
        for prompt in searched
        if "X" in (value := reference(prompt, pattern, "X", 8)[0])
        and value[value.index("X") + 1] not in value[: value.index("X")]
    )
    before, _, rest = value.partition("X")
    (token,) = spell(rest[0])
    calls = run(prompt, pattern, "X", max_tokens=8, stop_token_ids=[token])
    assert (text_of(calls[1].tokens), calls[1].end.matched) == (before, token)
    assert calls[2].tokens == greedy(prompt + spell(before + "X"), 5)
