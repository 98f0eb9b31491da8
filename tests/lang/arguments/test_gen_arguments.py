"""Arguments of gen and select: how they reach the runtime, and which are refused before anything runs."""

from __future__ import annotations

import pytest
from sample_programs import run_expression

import plait
from plait import gen, gen_int, gen_string, select
from plait.constrained.specs import Choices, Regex
from plait.runtime.messages import Generate, Select


def sampling_of_last_gen(backend):
    return backend.scheduler.sent(Generate)[-1].sampling


def test_gen_sends_every_sampling_keyword(backend):
    given = {
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "typical_p": 0.9,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {5: 1.5, 7: -100},
        "ignore_eos": True,
        "token_healing": True,
        "seed": 7,
    }
    run_expression(
        gen(
            "x",
            max_tokens=9,
            stop=["\n", "."],
            stop_token_ids=[3, 4],
            stop_regex="[0-9]+;",
            timeout=5,
            return_logprob=True,
            top_logprobs_num=2,
            **given,
        )
    )
    sent = sampling_of_last_gen(backend)
    assert {name: getattr(sent, name) for name in given} == given
    assert (sent.max_tokens, sent.stop, sent.stop_token_ids) == (9, ("\n", "."), (3, 4))
    assert sent.stop_regex == ("[0-9]+;",)
    assert (sent.timeout_s, sent.logprobs, sent.top_logprobs) == (5.0, True, 2)


def test_default_sampling_is_that_of_sglang(backend):
    run_expression(gen("x"))
    sent = sampling_of_last_gen(backend)
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.top_k) == (128, 1.0, 1.0, -1)


def test_gen_overrides_the_sampling_defaults_of_run(backend):
    run_expression(
        gen("x", temperature=0, stop="b"), temperature=0.7, stop=["a"], max_new_tokens=5, top_p=0.5, timeout=3
    )
    sent = sampling_of_last_gen(backend)
    assert (sent.temperature, sent.stop, sent.max_tokens, sent.top_p, sent.timeout_s) == (0.0, ("b",), 5, 0.5, 3.0)
    run_expression(gen("x"), max_tokens=6)
    assert sampling_of_last_gen(backend).max_tokens == 6


def test_stop_list_of_the_caller_is_copied(backend):
    stops = ["\n"]
    run_expression(gen("x", stop=stops), stop=stops)
    assert stops == ["\n"]
    stops.append("later")
    assert sampling_of_last_gen(backend).stop == ("\n",)


def test_gen_copies_its_logit_bias_and_checks_it(backend):
    bias = {5: 1.0}
    expr = gen("x", logit_bias=bias)
    bias[6] = 1.0
    run_expression(expr)
    assert sampling_of_last_gen(backend).logit_bias == {5: 1.0}
    run_expression(gen("x"), logit_bias={3: 2.0})
    assert sampling_of_last_gen(backend).logit_bias == {3: 2.0}
    for wrong in ({5: 101}, {"5": 1.0}, [5], {-1: 1.0}):
        with pytest.raises(plait.InputError, match="logit_bias"):
            gen("x", logit_bias=wrong)


def test_gen_copies_its_stop_list(backend):
    stop = ["."]
    expr = "p" + gen("x", stop=stop)
    stop[0] = 5

    @plait.function
    def program(s):
        s += expr

    program.run()
    assert backend.scheduler.sent(Generate)[0].sampling.stop == (".",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gen("x", temprature=1), r"gen\('x'\) has no keyword 'temprature' \(did you mean 'temperature'\?\)"),
        (lambda: gen("x", json_schema="{"), "the json_schema cannot be used"),
        (lambda: gen("x", json_schema={}, regex="a"), "regex and json_schema"),
        (lambda: gen("x", ebnf=3), "the ebnf cannot be used"),
        (lambda: gen("x", stop_regex="a*"), "stop_regex has 'a\\*'.*empty text"),
        (lambda: gen("x", stop_regex=["a", "x$"]), "stop_regex .*anchor"),
        (lambda: gen("x", stop_regex="a(?=b)"), "stop_regex .*lookaround"),
        (lambda: gen("x", stop_regex="(a{99}){99}"), "stop_regex .*more than 256 characters"),
        (lambda: gen("x", stop_regex="(a?){99}b"), "stop_regex .*more than 2048 edges"),
        (lambda: gen("x", stop_regex="("), "stop_regex .*unterminated subpattern"),
        (lambda: gen("x", stop_regex=[1]), "stop_regex has 1.*not text"),
        (lambda: gen("x", stop_regex="a", regex="a+", complete=True), "complete .*stop_regex"),
        (lambda: gen("x", stop_regex="a", type=int), "stop_regex .*type=int"),
        (lambda: gen("x", max_new_tokens=3), "did you mean 'max_tokens'"),
        (lambda: gen("x", return_text_in_logprobs=False), "return_text_in_logprobs must be True"),
        (lambda: gen("x", temperature=float("nan")), r"gen\('x'\): temperature must be finite"),
        (lambda: gen("x", temperature=-1), "temperature must be"),
        (lambda: gen("x", temperature="hot"), "temperature must be a number"),
        (lambda: gen("x", top_p=0), "top_p must be"),
        (lambda: gen("x", max_tokens=-1), "max_tokens must be"),
        (lambda: gen("x", max_tokens=2, min_tokens=3), r"min_tokens \(3\) is above max_tokens"),
        (lambda: gen("x", n=0), "n must be an integer from 1"),
        (lambda: gen("x", n=True), "n must be"),
        (lambda: gen("x", stop=""), "stop strings must be non-empty"),
        (lambda: gen("x", stop=[1]), "stop strings must be"),
        (lambda: gen("x", stop_token_ids=[-1]), "stop_token_ids has -1.*not a token id"),
        (lambda: gen("x", timeout=0), "timeout must be above 0"),
        (lambda: gen("x", return_logprob=1), "return_logprob must be True or False"),
        (lambda: gen("x", top_logprobs_num=1000, return_logprob=True), "top_logprobs_num must be"),
        (lambda: gen("x", top_logprobs_num=2, return_logprob=False), "return_logprob"),
        (lambda: gen(3), "name of a variable .*non-empty"),
        (lambda: gen(""), "name of a variable .*non-empty"),
        (lambda: gen("x", regex="(["), r"the regex '\(\[' is not valid"),
        (lambda: gen("x", regex=5), "regex must be a pattern as text"),
        (lambda: gen("x", regex="a" * 70_000), "not valid: the pattern is longer"),
        (lambda: gen("x", regex="a", choices=["a"]), "or choices, not both"),
        (lambda: gen("x", choices_method=plait.greedy_token_selection), "choices_method needs choices"),
        (lambda: gen("x", regex="a", think=True, choices_method=plait.greedy_token_selection), "needs choices"),
        (lambda: gen("x", regex="a", think=True, tool_choice="auto"), "tool_choice needs tools"),
        (lambda: gen("x", regex="a", think=True, type=int), "type cannot be combined with regex"),
        (lambda: gen("x", regex="a", draft_then_constrain=True, type=int), "type cannot be combined with regex"),
        (lambda: gen("x", regex="a", think=""), "think must be True or one of"),
        (lambda: gen("x", choices=["a"], retries=1), "retries needs a type"),
        (lambda: gen("x", choices=["a", "b"], max_tokens=3), "max_tokens .*choices are scored"),
        (lambda: gen("x", choices=["a", "b"], n=2), "n has no effect .*choices are scored"),
        (lambda: gen("x", choices=["a", "b"], temperature=1, stop="a"), "stop has no effect with choices"),
        (
            lambda: gen("x", choices=["a"], temperature=1, choices_method=plait.token_length_normalized),
            "select scores its choices",
        ),
        (lambda: select("x"), "needs choices"),
        (lambda: select("x", []), "1 to 1024 choices to score, not 0"),
        (lambda: select("x", ["a", "a"]), r"a choice is given twice \(choice 1\)"),
        (lambda: select("x", ["a", ""]), "a choice is empty"),
        (lambda: select("x", ["a", 1]), "a choice must be a text"),
        (lambda: select("x", "yes"), "choices must be a list of texts"),
        (lambda: select("x", 5), "choices must be a list of texts"),
        (lambda: select("x", [str(i) for i in range(1025)]), "1 to 1024 choices to score, not 1025"),
        (lambda: select("x", ["a"], temperature=0.5), r"gen\('x', choices=\[...\], temperature=0.5\)"),
        (lambda: select("x", ["a"], choices_method="greedy_token_selection"), "the objects, not their names"),
        (lambda: select("x", ["a"], timout=1), r"select\('x'\) has no keyword 'timout' \(did you mean 'timeout'\?\)"),
        (lambda: gen("x", bogus=1), r"gen\('x'\) has no keyword 'bogus'"),
        (lambda: plait.user(None), "None cannot be appended"),
        (lambda: select("x", ["a"], timeout=-1), "timeout must be"),
        (lambda: gen_int("x", regex="a"), r"gen_int\('x'\) has no keyword 'regex'"),
        (lambda: gen_string("x", choices=["a"]), "has no keyword 'choices'"),
        (lambda: gen_int("x", tempo=1), "has no keyword 'tempo'"),
        (lambda: plait.image("cat.png"), r"image\(...\) is not supported: .* read text only"),
        (lambda: plait.video("cat.mp4", 4), "read text only"),
    ],
)
def test_wrong_argument_of_an_expression_is_an_input_error(make, message):
    with pytest.raises(plait.InputError, match=message):
        make()


def test_min_tokens_above_max_tokens_of_run_names_program_and_variable(backend):
    with pytest.raises(plait.ProgramError, match="program 'program', variable 'x': InputError: min_tokens") as caught:
        run_expression(gen("x", min_tokens=20), max_new_tokens=10)
    assert caught.value.variable == "x"


def test_gen_int_and_gen_string_are_regex_constraints(backend):
    state = run_expression(gen("x", regex="[0-9]+"))
    assert backend.scheduler.sent(Generate)[-1].constraint == Regex("[0-9]+")
    assert state["x"] == "42"
    run_expression(gen_int("x", 5, temperature=0))
    sent = backend.scheduler.sent(Generate)[-1]
    assert sent.sampling.max_tokens == 5 and sent.constraint.pattern.startswith("[-+]?")
    run_expression(gen_string("x"))
    assert backend.scheduler.sent(Generate)[-1].constraint.pattern.startswith('"')


def test_choices_are_scored_without_and_sampled_with_a_temperature(backend):
    backend.scheduler.pick = lambda prompt, choices: choices.index("no")
    for expr in (gen("x", choices=["yes", "no"]), gen("x", choices=("yes", "no"), temperature=0, return_logprob=True)):
        assert run_expression(expr, temperature=0.9, n=2, stop="e")["x"] == "no"
    assert (
        run_expression(gen("x", choices=iter(["yes", "no"]), choices_method=plait.greedy_token_selection))["x"] == "no"
    )
    sent = backend.scheduler.sent(Select)
    assert [request.method for request in sent] == ["token_length_normalized"] * 2 + ["greedy_token_selection"]
    assert not backend.scheduler.sent(Generate)

    state = run_expression(gen("x", choices=["yes", "a longer one"], temperature=0.5), stop="e", min_tokens=3)
    sampled = backend.scheduler.sent(Generate)[0]
    assert sampled.constraint == Choices(("yes", "a longer one")) and state["x"] == "yes"
    assert sampled.sampling.max_tokens >= len("a longer one")
    assert (sampled.sampling.stop, sampled.sampling.min_tokens, sampled.sampling.temperature) == ((), 0, 0.5)
