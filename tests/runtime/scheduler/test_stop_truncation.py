"""Stop strings and stop patterns truncate the output exactly, across token borders."""

from __future__ import annotations

import re

from fake_engine import (
    EOS,
    assert_no_used_pages,
    generate,
    greedy,
    make_engine_loop,
    outcomes,
    run_until_idle,
    spell,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.messages import Append, Open

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 20), st.integers(1, 4))
def test_stop_strings_cut_exactly_and_the_session_continues_there(prompt, at, size):
    free = greedy(prompt, 30)
    stop = text_of(free)[at : at + size]
    if not stop:
        return
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, prompt), generate(1, 1, 30, stop=[stop]), generate(1, 2, 5)
    )
    expected = text_of(free).partition(stop)[0]
    assert text_of(calls[1].tokens) == expected
    assert (calls[1].end.reason, calls[1].end.matched) == ("stop", stop)
    assert calls[2].tokens == greedy(prompt + spell(expected), 5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 20), st.integers(1, 3))
def test_stop_patterns_cut_exactly_and_the_session_continues_there(prompt, at, size):
    free = text_of(greedy(prompt, 30))
    letters = free[at : at + size]
    if not letters:
        return
    pattern = f"[{re.escape(letters)}]" + ".?" * (size - 1) + re.escape(letters[-1])
    ends = ((end, start) for end in range(len(free) + 1) for start in range(end))
    match = next(((start, end) for end, start in ends if re.fullmatch(pattern, free[start:end])), None)
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, prompt), generate(1, 1, 30, stop_regex=pattern), generate(1, 2, 5)
    )
    expected = free if match is None else free[: match[0]]
    assert text_of(calls[1].tokens) == expected
    assert match is None or (calls[1].end.reason, calls[1].end.matched) == ("stop", pattern)
    assert calls[2].tokens == greedy(prompt + spell(expected), 5)


def test_tokens_that_a_stop_string_may_cut_are_not_sent_early():
    prompt = [1, 2, 3]
    free = greedy(prompt, 10)
    stop = text_of(free)[4:8]
    engine_loop, transport, _ = make_engine_loop()
    run_until_idle(engine_loop, transport, Open(1), Append(1, prompt), generate(1, 1, 10, stop=[stop]))
    assert text_of(outcomes(transport)[1].tokens) == text_of(free)[:4]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 50), st.integers(4, 10), st.integers(50, 70))
def test_a_stop_string_may_begin_before_a_retraction(seed, size, pages):
    prompts = [[1 + (seed + i) % 8, 2, 3] for i in range(4)]
    requests, expected = [], {}
    for i, prompt in enumerate(prompts):
        free = greedy(prompt, 40, ignore_eos=True)
        at = next((k for k in range(20, 30) if EOS not in free[: k + size]), None)
        if at is None:
            return
        stop = text_of(free[at : at + size])
        requests += [
            Open(i),
            Append(i, prompt),
            generate(i, i, 40, ignore_eos=True, stop=[stop]),
            generate(i, 10 + i, 3),
        ]
        expected[i] = text_of(free).partition(stop)[0]
    engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=16, rows=4)
    calls = run_until_idle(engine_loop, transport, *requests)
    for i, text in expected.items():
        assert text_of(calls[i].tokens) == text
        assert calls[10 + i].tokens == greedy(prompts[i] + spell(text), 3)
    assert_no_used_pages(engine_loop)
