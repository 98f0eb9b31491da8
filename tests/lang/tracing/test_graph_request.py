"""A straight-line graph as a request to /v1/programs; other graphs name the step that has no form there."""

from __future__ import annotations

import json

import pytest
from compiled_programs import add, compile_body, review

import plait
from plait import gen, race, select
from plait.runtime.server.protocols.programs.program_compiler import compile_program
from plait.runtime.server.protocols.programs.types import ProgramRequest


def compile_on_the_server(graph, **arguments):
    import msgspec

    request = graph.json(**arguments)
    body = msgspec.json.decode(json.dumps(request).encode(), type=ProgramRequest)
    return compile_program(body, 128).steps


def test_straight_line_graph_becomes_a_program_request():
    graph = review.compile(temperature=0, max_tokens=9)
    assert graph.is_straight
    request = graph.json(text="Great <shoes>.")
    assert request["defaults"] == {"temperature": 0.0, "max_tokens": 9}
    assert request["program"][1] == {
        "role": "user",
        "content": [{"text": "A review: "}, {"text": "Great <shoes>."}, {"text": "\nWhat does it say?"}],
    }
    fork = request["program"][5]["fork"]
    assert fork["join"] == "gather" and len(fork["branches"]) == 2
    assert {"var": "detail", "index": [1]} in request["program"][6]["content"]
    assert compile_on_the_server(graph, text="x")


def test_open_arguments_are_variables_of_the_request():
    request = review.compile().json()
    assert {"var": "text"} in request["program"][1]["content"]
    with pytest.raises(plait.InputError, match=r"no argument 'txt' \(did you mean 'text'\?\)"):
        review.compile().json(txt="a")
    with pytest.raises(plait.InputError, match="arguments of a request are text, not int"):
        review.compile().json(text=5)


def test_request_has_every_option_of_gen_and_select():
    from plait.constrained.specs import JsonObject

    @plait.function
    def program(s):
        s += "p" + gen("a", 5, 2, n=2, stop=["x", "y"], stop_token_ids=[3], temperature=0.5, top_p=0.9, top_k=4)
        s += gen("b", min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3, ignore_eos=True, seed=7, timeout=9)
        s += gen("c", return_logprob=True, top_logprobs_num=2, regex="a+") + gen("d", ebnf='root ::= "a"')
        s += gen("e", lark='start: "a"') + gen("f", json_schema={"type": "integer"}, complete=True)
        s += gen("k", logit_bias={5: 1.5, 7: -100}, repetition_penalty=1.25)
        s += gen("g", constraint=JsonObject()) + gen("h", choices=["a", "b"], temperature=1) + gen("i", type=bool)
        s += select("j", ["a", "b"], choices_method=plait.greedy_token_selection, timeout=3) + s["a"][1]

    steps = compile_on_the_server(program.compile())
    by_name = {step.name: step for step in steps[1:-1]}
    a, b, c = (by_name[name].sampling for name in "abc")
    assert (a.max_tokens, a.min_tokens, a.stop, a.stop_token_ids, by_name["a"].n) == (5, 2, ("x", "y"), (3,), 2)
    assert (a.temperature, a.top_p, a.top_k, b.min_p, b.frequency_penalty) == (0.5, 0.9, 4, 0.1, 0.2)
    assert (b.presence_penalty, b.ignore_eos, b.seed, b.timeout_s, c.logprobs, c.top_logprobs) == (
        *(0.3, True, 7, 9.0),
        *(True, 2),
    )
    assert [type(by_name[name].constraint).__name__ for name in "cdefghi"] == [
        *("Regex", "Ebnf", "Lark", "JsonSchema", "JsonObject", "Choices", "Choices")
    ]
    assert by_name["f"].sampling.complete
    k = by_name["k"].sampling
    assert (k.logit_bias, k.repetition_penalty) == ({5: 1.5, 7: -100.0}, 1.25)
    assert (by_name["j"].method, by_name["j"].timeout_s) == ("greedy_token_selection", 3.0)
    assert steps[-1].index == (1,)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda s: s.__iadd__(s["x"].strip()), r"the value of s\['x'\]\.strip\(\) is computed from other values"),
        (lambda s: s.set_var("y", 1), "the body sets a variable"),
        (lambda s: s.var_scope("y").__enter__(), "var_scope"),
        (lambda s: [s.fork(2)[0].sync(), s.__iadd__("y")], "between a fork and its join"),
        (lambda s: s.fork(2)[0].sync(), "the branches of a fork are never joined"),
        (lambda s: s.user_begin(), "a turn is not closed"),
        (lambda s: s.text(), "the text of a state is read"),
        (lambda s: s.__iadd__(gen("t", tools=[add])), "tools, named groups and separate_reasoning"),
        (lambda s: s.__iadd__(gen("t", return_logprob=True, logprob_start_len=0)), "logprob_start_len"),
        (lambda s: s.fork(2).adopt(0), "a branch is adopted"),
        (lambda s: race(s.fork(2)).join(), "a race"),
        (lambda s: s.cancel(), "ended early"),
        (
            lambda s: [forks := s.fork(2), forks[0].__iadd__(gen("z")), forks[1].__iadd__(forks[0]["z"]), forks.join()],
            r"the value of s\['z'\] is not a variable there",
        ),
        (lambda s: [v := s["x"], s.__iadd__(gen("x")), s.__iadd__(v)], "is not a variable there"),
        (lambda s: s.__iadd__(f"{s['x']:>9}"), "is computed from other values"),
    ],
)
def test_unsupported_step_is_a_compile_error_with_its_reason(step, reason):
    def body(s):
        s += "p" + gen("x")
        step(s)

    graph = compile_body(body)
    assert not graph.is_straight
    with pytest.raises(plait.CompileError, match=f"not a straight-line program: .*{reason}") as caught:
        graph.json()
    assert caught.value.place.filename == __file__


@pytest.mark.parametrize("defaults", [{"exact": True}, {"particles": 4}], ids=["exact", "particles"])
def test_drawing_whole_values_as_a_default_is_for_constrained_gens(defaults):
    """A run draws free text as ever, and so does the request."""

    @plait.function
    def program(s):
        s += "p" + gen("free") + gen("value", regex="a|b")

    steps = compile_on_the_server(program.compile(**defaults))
    drawn = [bool(step.sampling.exact or step.sampling.particles) for step in steps if hasattr(step, "sampling")]
    assert drawn == [False, True]


def test_graph_without_calls_has_no_request():
    with pytest.raises(plait.CompileError, match="neither gen nor select"):
        compile_body(lambda s: s.__iadd__("p")).json()
