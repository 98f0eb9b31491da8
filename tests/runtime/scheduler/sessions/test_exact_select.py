"""A select with the method "exact" draws a choice by its probability."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from fake_engine import logprob, make_engine_loop, run_until_idle, spell, text_of

from plait.runtime.messages import Append, Close, Open, Select
from plait.runtime.scheduler.sessions.choice_scoring import _draw

PROMPT = [25, 3]  # of three likely choices
CHOICES = ["a", "be", "car"]


def expected():
    """{choice: its probability among the choices}"""
    mass = {}
    for choice in CHOICES:
        tokens = spell(choice)
        mass[choice] = math.exp(sum(logprob(PROMPT + tokens[:i], token) for i, token in enumerate(tokens)))
    return {choice: value / sum(mass.values()) for choice, value in mass.items()}


def test_a_choice_is_drawn_by_its_probability_and_a_seed_repeats():
    engine_loop, transport, _ = make_engine_loop()
    messages = []
    for i in range(400):
        choices = [spell(choice) for choice in CHOICES]
        messages += [Open(i), Append(i, PROMPT), Select(i, i, choices, "exact", seed=i // 2), Close(i)]
    calls = run_until_idle(engine_loop, transport, *messages)
    drawn = [text_of(calls[i].tokens) for i in range(400)]
    assert drawn[::2] == drawn[1::2]
    probabilities = expected()
    assert calls[0].end.choice.scores == pytest.approx(list(probabilities.values()), rel=1e-4)
    counts = Counter(drawn[::2])
    for choice, probability in probabilities.items():
        assert abs(counts[choice] - 200 * probability) <= 4 * math.sqrt(200 * probability * (1 - probability)) + 1
    assert all(CHOICES[calls[i].end.choice.index] == drawn[i] for i in range(400))
    assert len(counts) > 1, "the example has one likely choice only"


def test_without_a_seed_the_draws_differ():
    engine_loop, transport, _ = make_engine_loop()
    choices = [[token] for token in range(1, 60)]
    messages = []
    for i in range(12):
        messages += [Open(i), Append(i, [17, 5]), Select(i, i, choices, "exact"), Close(i)]
    calls = run_until_idle(engine_loop, transport, *messages)
    assert len({calls[i].tokens[0] for i in range(12)}) > 1


def test_impossible_choices_are_never_drawn():
    assert [_draw([0.0, 0.5, 0.0, 0.5], uniform) for uniform in (0.0, 0.49, 0.5, 0.999999)] == [1, 1, 3, 3]
