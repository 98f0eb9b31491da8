"""SGLang's API beside gen and select: bind, generator_style, dtype, logprob_start_len, global_config."""

from __future__ import annotations

import asyncio

import pytest
from scripted_scheduler import Gate

import plait as sgl
from plait.constrained import Regex
from plait.runtime.messages import Generate


@sgl.function
def qa(s, question, mark="?"):
    s += question + mark + sgl.gen("answer")


def test_bound_arguments_can_be_overridden(backend):
    bound = qa.bind(question="Q")
    assert bound.run().text() == "Q? fine."
    assert bound.bind(mark="!").run().text() == "Q! fine."
    assert bound.run(question="R").text() == "R? fine." == bound.run("R").text()
    assert [state.text() for state in bound.run_batch([{}, {"mark": "."}])] == ["Q? fine.", "Q. fine."]
    assert asyncio.run(bound.arun(mark=":")).text() == "Q: fine."
    assert qa.name == bound.name and bound.run(temperature=0)["answer"] == " fine."
    with pytest.raises(sgl.InputError, match="missing a required argument: 'question'"):
        qa.run()

    @sgl.function
    def outer(s):
        bound(s)

    assert outer.run().text() == "Q? fine."
    with pytest.raises(sgl.InputError, match="did you mean 'question'"):
        qa.bind(qestion="Q")


def test_generator_style_yields_states_in_order_of_completion(backend):
    late = Gate("late")
    backend.script(("b?", late), default="early")
    states = qa.run_batch([{"question": q} for q in "abc"], generator_style=True, num_threads=3)
    assert next(states)["answer"] == "early"
    late.open()
    assert [state["answer"] for state in states] == ["late", "early"]
    assert list(qa.run_batch([], generator_style=True)) == []
    with pytest.raises(sgl.InputError, match="generator_style must be True or False"):
        qa.run_batch([{"question": "a"}], generator_style=1)


def test_closing_the_generator_ends_the_remaining_items(backend):
    backend.script(("b?", Gate("never")), default="early")
    states = qa.run_batch([{"question": q} for q in "abc"], generator_style=True)
    assert next(states)["answer"] == "early"
    states.close()
    assert backend.scheduler.open_sessions() == 0


def test_generator_style_of_an_async_program(backend):
    @sgl.function
    async def program(s, i):
        s += f"{i}" + sgl.gen("x")
        return await s["x"]

    assert [state.ret_value for state in program.run_batch([{"i": 1}, {"i": 2}], generator_style=True)] == [
        " fine."
    ] * 2


def test_dtype_constrains_and_converts(backend):
    @sgl.function
    def program(s):
        s += "Q" + sgl.gen("i", dtype="int") + sgl.gen("s", dtype=str, max_tokens=9)

    state = program.run()
    assert state["i"] == 42 and state["s"] == "42"
    assert backend.scheduler.sent(Generate)[1].constraint == Regex(r'"[\w\d\s]*"')
    for make in (lambda: sgl.gen("x", dtype=list), lambda: sgl.gen("x", dtype=int, regex="a")):
        with pytest.raises(sgl.InputError, match="dtype"):
            make()


def test_logprob_start_len_reaches_the_runtime(backend):
    @sgl.function
    def program(s, start):
        s += "Q" + sgl.gen("x", return_logprob=True, logprob_start_len=start)

    program.run(3)
    program.run(-1)
    assert [request.sampling.prompt_logprobs_from for request in backend.scheduler.sent(Generate)] == [3, None]
    with pytest.raises(sgl.InputError, match="logprob_start_len must be"):
        sgl.gen("x", logprob_start_len=-2)


def test_fork_before_any_text_with_zero_offsets(backend):
    @sgl.function
    def program(s):
        forks = s.fork(2, position_ids_offset=[0, 0])
        forks += lambda i: f"{i}" + sgl.gen("x")
        forks.join()
        with pytest.raises(sgl.InputError, match="position_ids_offset is not supported"):
            s.fork(2, position_ids_offset=[0, 100])

    assert program.run()["x"] == [" fine.", " fine."]


def test_global_config_accepts_its_fields_and_refuses_others(backend):
    sgl.global_config.default_backend = backend
    assert sgl.global_config.default_backend is backend.client
    sgl.global_config.enable_precache_with_tracing = False
    assert sgl.global_config.enable_precache_with_tracing is False and sgl.global_config.verbosity == 0
    with pytest.raises(sgl.InputError, match="is always False here"):
        sgl.global_config.enable_precache_with_tracing = True
    with pytest.raises(sgl.InputError, match="no 'tensor_parallel'"):
        sgl.global_config.tensor_parallel = 2
    with pytest.raises(AttributeError, match="no 'tensor_parallel'"):
        _ = sgl.global_config.tensor_parallel
