"""The text of the error of a call behind a text that the session cannot hold."""

from __future__ import annotations

import pytest
from fake_engine import generate, make_engine_loop, run_until_idle

from plait.runtime.messages import Append, Fork, Open

CASES = {
    "queued": ([Append(1, [1] * 99)], "the text has 99 tokens or more; the context holds 30"),
    "in two": ([Append(1, [1] * 20)] * 2, "the text has 40 tokens"),
    "token": ([Append(1, [10**6])], "a token id is outside the vocabulary of"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_says_what_is_wrong_with_its_text(name):
    texts, expected = CASES[name]
    engine_loop, transport, _ = make_engine_loop(context=30)
    calls = run_until_idle(
        engine_loop, transport, Open(1), *texts, Fork(1, [2]), generate(1, 1), generate(1, 2), generate(2, 3)
    )
    for call in (1, 2, 3):  # no call failed before the first one, and the cause of the others is the text, too
        assert calls[call].end.text.startswith(expected)


def test_a_call_behind_a_failed_one_names_it():
    engine_loop, transport, _ = make_engine_loop()
    calls = run_until_idle(engine_loop, transport, Open(1), generate(1, 1), generate(1, 2))
    assert calls[1].end.text == "the prompt is empty"
    assert calls[2].end.text == "the session cannot continue after a failed call: the prompt is empty"
