"""Scripted answers that are members of an Enum or a Literal, and an answer's finish reason."""

from __future__ import annotations

import enum
from typing import Literal

import pytest

import plait
from plait import gen, select
from plait.testing import Answer, Scripted, ScriptError

pytestmark = pytest.mark.timeout(60)


class Mood(enum.Enum):
    CALM = "calm"
    LOUD = 2


@plait.function
def classify(s, kind):
    s += "It is " + select("x", kind)
    s += " It is " + gen("y", type=kind)
    return s["x"], s["y"]


@pytest.mark.parametrize(
    ("kind", "member"),
    [(Mood, Mood.CALM), (Mood, Mood.LOUD), (Literal[1, None, "b"], None), (Literal[1, None, "b"], 1), (bool, True)],
)
def test_a_member_is_an_answer(kind, member):
    with Scripted({"x": member, "y": member}):
        assert classify.run(kind).ret_value == (member, member)


def test_members_have_scores():
    with Scripted({"x": {Mood.CALM: -2.0, Mood.LOUD: -1.0}, "y": "calm"}):
        state = classify.run(Mood)
    assert state["x"] is Mood.LOUD and state.get_meta_info("x")["choice_scores"] == [-2.0, -1.0]


def test_what_is_no_member_is_an_error():
    for answer in (5, object(), "loud"):
        with pytest.raises(plait.ProgramError) as caught, Scripted({"x": answer}):
            classify.run(Mood)
        assert isinstance(caught.value.__cause__, ScriptError)


def test_a_misspelt_finish_reason_is_an_error():
    with pytest.raises(plait.InputError, match=r'finish_reason must be .*"length", not .lengt.'):
        Answer("a b", finish_reason="lengt")
