"""Arguments of run and run_batch, and functions that can be programs."""

from __future__ import annotations

import asyncio

import pytest

import plait
from plait import gen


@plait.function
def qa(s, question, mark="?"):
    s += question + mark + gen("answer")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qa.run(), "program 'qa': missing .*'question'.*question, mark"),
        (lambda: qa.run("a", qestion="b"), "unexpected keyword argument 'qestion'"),
        (lambda: qa.run("a", "b", "c"), "too many positional arguments"),
        (lambda: qa.run("a", temperature=-1), "run: temperature must be"),
        (lambda: qa.run("a", max_tokens=1, max_new_tokens=2), "two names of one setting"),
        (lambda: qa.run("a", json_schema="{}"), "a constraint belongs to one gen"),
        (lambda: qa.run("a", use_thread=False), "'use_thread' is not supported"),
        (lambda: qa.run("a", backend="http://localhost"), "a backend must be a Runtime, an Engine, a Client"),
        (lambda: qa.run("a", backend=plait.Program), "a backend must be"),
        (lambda: qa.run_batch([{"question": "a"}, {"qestion": "b"}]), "program 'qa', item 1: missing a required"),
        (lambda: qa.run_batch([{"quest": "b"}]), r"'question', but got 'quest' \(did you mean 'question'\?\)"),
        (lambda: qa.run_batch([{"question": "a", "seed": 3}]), r"'seed' \('seed' is a keyword of run and run_batch,"),
        (lambda: qa.run_batch({"question": "a"}), "a list of dicts"),
        (lambda: qa.run_batch(["a"]), "item 0 of run_batch must be a dict"),
        (lambda: qa.run_batch([{"question": "a"}], num_threads=0), "num_threads must be"),
        (lambda: qa.run_batch([{"question": "a"}], temprature=1), "did you mean 'temperature'"),
        (lambda: qa.run("a", temprature=1), "did you mean 'temperature'"),
        (lambda: qa.run_batch(None), "a list of dicts"),
        (lambda: qa.run("a", stream="x"), "stream must be True or False"),
        (lambda: qa.run("a", stop_token_ids=[100_000]), "run: stop_token_ids"),
        (lambda: qa.run("a", min_tokens=9, max_tokens=3), "run: min_tokens"),
        (lambda: qa("a", temprature=1), "did you mean 'temperature'"),
        (lambda: plait.function(num_api_spec_tokens=5), "num_api_spec_tokens"),
        (lambda: plait.function(lambda: None), "needs the state as its first parameter"),
        (lambda: plait.function(5), "decorates a function"),
        (lambda: plait.set_default_backend(3), "a backend must be"),
    ],
)
def test_wrong_argument_of_run_sends_nothing(backend, call, message):
    with pytest.raises(plait.InputError, match=message):
        call()
    assert backend.scheduler.requests == []


def test_generator_functions_cannot_be_programs():
    async def async_generator(s):
        yield
        pass

    def generator(s):
        yield 1

    for body in (async_generator, generator):
        with pytest.raises(plait.InputError, match="must be a function without yield"):
            plait.function(body)


def test_a_parameter_named_like_a_sampling_keyword_is_the_programs_own(backend):
    @plait.function
    def branches(s, n):
        s += "p" + plait.gen("x", max_tokens=1)
        return n

    for state in (
        branches.run(3),
        branches.run(n=3),
        asyncio.run(branches.arun(n=3)),
        *branches.run_batch([{"n": 3}]),
        *asyncio.run(branches.arun_batch([{"n": 3}])),
        branches.bind(n=3).run(),
        branches.compile(n=3).run(),
        branches.compile().run(n=3),
    ):
        assert isinstance(state["x"], str)
    assert branches.run(n=3).ret_value == asyncio.run(branches.arun(n=3)).ret_value == 3
    for run in (branches.run_batch, lambda *args, **kwargs: asyncio.run(branches.arun_batch(*args, **kwargs))):
        with pytest.raises(plait.InputError, match="'n' is a parameter of program 'branches': give it in each item"):
            run([{"n": 3}], n=2)


def test_sampling_keywords_of_that_name_are_in_sampling(backend):
    @plait.function
    def branches(s, n):
        s += "p" + plait.gen("x", max_tokens=1)
        return n

    two = {"n": 2}
    for state in (
        branches.run(3, sampling=two),
        branches.run(n=3, sampling=two),
        asyncio.run(branches.arun(n=3, sampling=two)),
        *branches.run_batch([{"n": 3}], sampling=two),
        *asyncio.run(branches.arun_batch([{"n": 3}], sampling=two)),
        branches.compile(n=3, sampling=two).run(),
    ):
        assert len(state["x"]) == 2
    for wrong, message in (
        (False, "sampling must be a dict"),
        ([], "sampling must be a dict"),
        ({5: 2}, "sampling must be a dict"),
        ({"m": 2}, "sampling has no keyword 'm'"),
        (2, "must be a dict"),
        ({"seed": 2}, "seed is given twice"),
    ):
        with pytest.raises(plait.InputError, match=message):
            branches.run(n=3, sampling=wrong, seed=1)


def test_a_sampling_keyword_that_is_no_parameter_needs_no_dict(backend):
    @plait.function
    def several(s, question):
        s += question + plait.gen("x", max_tokens=1)

    assert len(several.run(question="Why?", n=5)["x"]) == 5


def test_function_decorator_with_arguments_keeps_name_and_docstring(backend):
    @plait.function(num_api_spec_tokens=None)
    def program(s):
        """Docstring."""

    assert program.name == "program" and program.__doc__ == "Docstring."
    assert repr(program) == "<plait program 'program'>"
    assert program.run().ret_value is None


@pytest.mark.parametrize(
    ("access", "message"),
    [
        (lambda: plait.VertexAI("gemini"), r"no 'VertexAI': .*LiteLLM\("),
        (lambda: qa.nothing, "no attribute 'nothing'"),
    ],
)
def test_missing_sglang_name_is_an_attribute_error(access, message):
    with pytest.raises(AttributeError, match=message):
        access()
