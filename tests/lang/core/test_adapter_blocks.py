"""Adapters in programs: which call is computed by which one. The sessions are recorded, not computed."""

from __future__ import annotations

import pytest

import plait
from plait import gen, select
from plait.lang.adapters import adapter_of_block
from plait.lang.testing.text_client import TextSession
from plait.testing import Scripted


@plait.function
def two_calls(s):
    s += "a" + gen("first", max_tokens=2, adapter="one")
    with plait.adapter("two"):
        s += gen("second", max_tokens=2) + select("third", ["x", "y"])
        s += gen("fourth", max_tokens=2, adapter="")
    s += gen("fifth", max_tokens=2)


@pytest.fixture
def forks(monkeypatch):
    """The adapters of the forks that sessions make, in order."""
    made = []
    fork = TextSession.fork

    def recorded(self, size, adapter=None):
        made.append(adapter)
        return fork(self, size)

    monkeypatch.setattr(TextSession, "fork", recorded)
    return made


def scripted(*texts):
    return Scripted(list(texts))


def test_the_session_continues_with_the_adapter_of_each_call(forks):
    state = two_calls.run(backend=scripted("1", "2", "x", "4", "5"))
    assert state.text() == "a12x45"
    assert forks == ["one", "two", ""], "calls of the same adapter need no fork"


def test_a_block_around_a_run_is_the_adapter_of_the_program(forks):
    with plait.adapter("mine"):
        two_calls.run(backend=scripted("1", "2", "x", "4", "5"))
        states = two_calls.run_batch([{}, {}], backend=scripted(*["1", "2", "x", "4", "5"] * 2), num_threads=2)
    assert len(states) == 2
    assert forks[:5] == ["mine", "one", "two", "", "mine"]
    assert sorted(forks) == sorted(3 * forks[:5])
    assert adapter_of_block() is None


def test_forks_of_a_state_keep_its_adapter(forks):
    @plait.function
    def program(s):
        s += "a" + gen(adapter="one", max_tokens=1)
        branches = s.fork(2)
        for branch in branches:
            branch += gen("b", max_tokens=1, adapter="one")

    program.run(backend=scripted("1", "2", "3"))
    assert forks == ["one", None]


def test_a_compiled_program_keeps_the_adapters_of_its_calls(forks):
    compiled = two_calls.compile()
    assert "adapter=one" in str(compiled) and "adapter=two" in str(compiled)
    compiled.run(backend=scripted("1", "2", "x", "4", "5"))
    assert forks == ["one", "two", ""]


def test_a_backend_without_adapters_refuses_one():
    with pytest.raises(plait.ProgramError, match="this backend has no adapters, and so no 'one'"):
        two_calls.run(backend=scripted("1"))
    with pytest.raises(plait.InputError, match="named by a text, not 3"):
        gen("x", adapter=3)


def test_results_of_another_adapter_are_not_taken_from_a_file(tmp_path, forks):
    def run(*texts):
        return two_calls.run_batch([{}], backend=scripted(*texts), resume=tmp_path / "results.jsonl")

    (first,) = run("1", "2", "x", "4", "5")
    (again,) = run()
    with plait.adapter("mine"):
        (other,) = run("6", "7", "y", "8", "9")
    assert [state.text() for state in (first, again, other)] == ["a12x45", "a12x45", "a67y89"]
