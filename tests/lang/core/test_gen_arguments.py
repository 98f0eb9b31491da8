"""The arguments of gen, select, run and run_batch: what is passed on, and what is refused before anything runs."""

from __future__ import annotations

import pytest

import plait
from plait import gen, gen_int, gen_string, select
from plait.constrained.specs import Choices, Regex
from plait.runtime.messages import Fork, Generate, Open, Select


def run(expr, **keywords):
    @plait.function
    def program(s):
        s += "p"
        s += expr

    return program.run(**keywords)


def sampling(backend):
    return backend.scheduler.sent(Generate)[-1].sampling


def test_every_sampling_keyword_arrives(backend):
    given = {
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.2,
        "ignore_eos": True,
        "seed": 7,
    }
    run(
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
    sent = sampling(backend)
    assert {name: getattr(sent, name) for name in given} == given
    assert (sent.max_tokens, sent.stop, sent.stop_token_ids) == (9, ("\n", "."), (3, 4))
    assert sent.stop_regex == ("[0-9]+;",)
    assert (sent.timeout_s, sent.logprobs, sent.top_logprobs) == (5.0, True, 2)


def test_the_defaults_are_sglangs(backend):
    run(gen("x"))
    sent = sampling(backend)
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.top_k) == (128, 1.0, 1.0, -1)


def test_run_gives_defaults_and_gen_overrides_them(backend):
    run(gen("x", temperature=0, stop="b"), temperature=0.7, stop=["a"], max_new_tokens=5, top_p=0.5, timeout=3)
    sent = sampling(backend)
    assert (sent.temperature, sent.stop, sent.max_tokens, sent.top_p, sent.timeout_s) == (0.0, ("b",), 5, 0.5, 3.0)
    run(gen("x"), max_tokens=6)
    assert sampling(backend).max_tokens == 6


def test_a_callers_stop_list_is_not_changed(backend):
    stops = ["\n"]
    run(gen("x", stop=stops), stop=stops)
    assert stops == ["\n"]
    stops.append("later")
    assert sampling(backend).stop == ("\n",)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gen("x", temprature=1), r"gen\('x'\) has no keyword 'temprature' \(did you mean 'temperature'\?\)"),
        (lambda: gen("x", json_schema="{"), "the json_schema cannot be used"),
        (lambda: gen("x", json_schema={}, regex="a"), "regex and json_schema exclude each other"),
        (lambda: gen("x", ebnf=3), "the ebnf cannot be used"),
        (lambda: gen("x", stop_regex="a*"), "stop_regex has 'a\\*', which cannot be used: .* matches the empty text"),
        (lambda: gen("x", stop_regex=["a", "x$"]), "an anchor or a word boundary is not supported"),
        (lambda: gen("x", stop_regex="a(?=b)"), "lookaround is not supported"),
        (lambda: gen("x", stop_regex="(a{99}){99}"), "more than 256 characters once its repeats are written out"),
        (lambda: gen("x", stop_regex="(a?){99}b"), "too many possible continuations"),
        (lambda: gen("x", stop_regex="("), "unterminated subpattern"),
        (lambda: gen("x", stop_regex=[1]), "stop_regex has 1, which is not text"),
        (
            lambda: gen("x", stop_regex="a", regex="a+", complete=True),
            "complete cannot be combined with stop, stop_regex",
        ),
        (lambda: gen("x", stop_regex="a", type=int), "stop_regex has no effect with type=int"),
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
        (lambda: gen("x", stop_token_ids=[-1]), "stop_token_ids has -1, which is not a token id"),
        (lambda: gen("x", timeout=0), "timeout must be above 0"),
        (lambda: gen("x", return_logprob=1), "return_logprob must be True or False"),
        (lambda: gen("x", top_logprobs_num=1000, return_logprob=True), "top_logprobs_num must be"),
        (lambda: gen("x", top_logprobs_num=2, return_logprob=False), "return_logprob"),
        (lambda: gen(3), "the name of a variable must be non-empty text"),
        (lambda: gen(""), "the name of a variable must be non-empty text"),
        (lambda: gen("x", regex="(["), r"the regex '\(\[' is not valid"),
        (lambda: gen("x", regex=5), "regex must be a pattern as text"),
        (lambda: gen("x", regex="a" * 70_000), "not valid: the pattern is longer"),
        (lambda: gen("x", regex="a", choices=["a"]), "or choices, not both"),
        (lambda: gen("x", choices_method=plait.greedy_token_selection), "choices_method needs choices"),
        (lambda: gen("x", choices=["a", "b"], max_tokens=3), "max_tokens has no effect when choices are scored"),
        (lambda: gen("x", choices=["a", "b"], n=2), "n has no effect when choices are scored"),
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
def test_a_mistake_is_refused_where_it_is_written(make, said):
    with pytest.raises(plait.InputError, match=said):
        make()


def test_a_contradiction_between_run_and_gen_names_program_and_variable(backend):
    with pytest.raises(plait.ProgramError, match="program 'program', variable 'x': InputError: min_tokens") as caught:
        run(gen("x", min_tokens=20), max_new_tokens=10)
    assert caught.value.variable == "x"


@plait.function
def qa(s, question, mark="?"):
    s += question + mark + gen("answer")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: qa.run(), "program 'qa': missing a required argument: 'question'; its parameters are question, mark"),
        (lambda: qa.run("a", qestion="b"), "unexpected keyword argument 'qestion'"),
        (lambda: qa.run("a", "b", "c"), "too many positional arguments"),
        (lambda: qa.run("a", temperature=-1), "run: temperature must be"),
        (lambda: qa.run("a", max_tokens=1, max_new_tokens=2), "two names of one setting"),
        (lambda: qa.run("a", json_schema="{}"), "a constraint belongs to one gen"),
        (lambda: qa.run("a", use_thread=False), "'use_thread' is not supported: calls always run"),
        (lambda: qa.run("a", backend="http://localhost"), "a backend must be a Runtime, an Engine or a Client"),
        (lambda: qa.run("a", backend=plait.Program), "a backend must be"),
        (lambda: qa.run_batch([{"question": "a"}, {"qestion": "b"}]), "program 'qa', item 1: missing a required"),
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
def test_nothing_starts_when_an_argument_is_wrong(backend, call, said):
    with pytest.raises(plait.InputError, match=said):
        call()
    assert backend.scheduler.requests == []


def test_programs_that_cannot_be():
    async def later(s):
        yield
        pass

    def several(s):
        yield 1

    for body in (later, several):
        with pytest.raises(plait.InputError, match="must be a function without yield"):
            plait.function(body)


def test_a_parameter_named_like_a_sampling_keyword(backend):
    @plait.function
    def branches(s, n):
        s += "p"
        s.fork(n)
        return n

    assert branches.run(3).ret_value == 3
    assert branches.run_batch([{"n": 2}])[0].ret_value == 2
    with pytest.raises(plait.InputError, match="has a parameter 'n', which is also a sampling keyword"):
        branches.run(n=3)


def test_function_with_and_without_parentheses(backend):
    @plait.function(num_api_spec_tokens=None)
    def program(s):
        """What it does."""

    assert program.name == "program" and program.__doc__ == "What it does."
    assert repr(program) == "<plait program 'program'>"
    assert program.run().ret_value is None


def test_regex_int_and_string(backend):
    state = run(gen("x", regex="[0-9]+"))
    assert backend.scheduler.sent(Generate)[-1].constraint == Regex("[0-9]+")
    assert state["x"] == "42"
    run(gen_int("x", 5, temperature=0))
    sent = backend.scheduler.sent(Generate)[-1]
    assert sent.sampling.max_tokens == 5 and sent.constraint.pattern.startswith("[-+]?")
    run(gen_string("x"))
    assert backend.scheduler.sent(Generate)[-1].constraint.pattern.startswith('"')


def test_choices_are_scored_unless_a_temperature_asks_for_sampling(backend):
    backend.scheduler.pick = lambda prompt, choices: choices.index("no")
    for expr in (gen("x", choices=["yes", "no"]), gen("x", choices=("yes", "no"), temperature=0, return_logprob=True)):
        assert run(expr, temperature=0.9, n=2, stop="e")["x"] == "no"
    assert run(gen("x", choices=iter(["yes", "no"]), choices_method=plait.greedy_token_selection))["x"] == "no"
    sent = backend.scheduler.sent(Select)
    assert [each.method for each in sent] == ["token_length_normalized"] * 2 + ["greedy_token_selection"]
    assert not backend.scheduler.sent(Generate)

    state = run(gen("x", choices=["yes", "a longer one"], temperature=0.5), stop="e", min_tokens=3)
    sampled = backend.scheduler.sent(Generate)[0]
    assert sampled.constraint == Choices(("yes", "a longer one")) and state["x"] == "yes"
    assert sampled.sampling.max_tokens >= len("a longer one")
    assert (sampled.sampling.stop, sampled.sampling.min_tokens, sampled.sampling.temperature) == ((), 0, 0.5)


def test_select_methods_timeout_and_meta(backend):
    backend.scheduler.pick = lambda prompt, choices: 1
    state = run(select("x", ["ab", "c"], choices_method=plait.unconditional_likelihood_normalized), timeout=4)
    sent = backend.scheduler.sent(Select)[0]
    assert (sent.method, sent.timeout_s) == ("unconditional_likelihood_normalized", 4.0)
    meta = state.get_meta_info("x")
    assert meta["choices"] == ["ab", "c"]
    assert meta["choice_scores"] == meta["normalized_prompt_logprobs"] == [-2.0, -1.0]
    assert meta["input_token_logprobs"] == [[(-2.0, 97, "a"), (-2.0, 98, "b")], [(-1.0, 99, "c")]]
    assert meta["normalized_unconditional_prompt_logprobs"] == [-3.0, -3.0]
    assert state["x"] == "c" and state.text() == "pc"
    run(select("x", ["a", "b"], timeout=1), timeout=4)
    assert backend.scheduler.sent(Select)[1].timeout_s == 1.0


def test_meta_info_of_a_gen(backend):
    backend.script(default="hé")
    state = run(gen("x", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True))
    meta = state.get_meta_info("x")
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (1, 0, 3)
    assert meta["output_token_logprobs"][0] == (-0.5, ord("h"), "h")
    assert meta["output_token_logprobs"][1][2] == "\ufffd"  # half a character
    assert [len(each) for each in meta["output_top_logprobs"]] == [2, 2, 2]
    assert "output_token_logprobs" not in run(gen("x")).get_meta_info("x")


def test_a_length_is_reported(backend):
    backend.script(default="abcdef")
    state = run(gen("x", max_tokens=3))
    assert state["x"] == "abc" and state.get_meta_info("x")["finish_reason"]["type"] == "length"


def test_meta_info_of_what_no_call_made(backend):
    @plait.function
    def program(s):
        s["x"] = 1

    with pytest.raises(plait.InputError, match="no meta info"):
        program.run().get_meta_info("x")


def test_n_samples(backend):
    answers = iter(["one", "two", "three"])
    backend.scheduler.answer = lambda prompt, request: next(answers, "four")

    @plait.function
    def program(s):
        s += "p" + gen("x", n=3, seed=10, temperature=1.0)
        s += "|" + gen("y", n=1)

    state = program.run()
    assert state["x"] == ["one", "two", "three"]
    assert state.text() == "pone|four"
    assert [meta["completion_tokens"] for meta in state.get_meta_info("x")] == [3, 3, 5]
    assert [each.sampling.seed for each in backend.scheduler.sent(Generate)] == [10, 11, 12, None]
    assert len(backend.scheduler.sent(Fork)) == 1 and len(backend.scheduler.sent(Open)) == 1
    assert backend.scheduler.open_sessions() == 0
    assert "".join(state.text_iter("x")) == "one"
    assert state.usage.calls == 4


def test_server_info_and_flush(backend):
    info = plait.get_server_info()
    assert info["context_length"] == 1 << 20 and info["total_pages"] == 0
    plait.flush_cache(backend)
    assert type(backend.scheduler.requests[-1]).__name__ == "FlushCache"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (lambda: plait.VertexAI("gemini"), r"no 'VertexAI': .*LiteLLM\("),
        (lambda: qa.nothing, "no attribute 'nothing'"),
    ],
)
def test_what_sglang_has_and_plait_has_not_says_what_to_use(missing, said):
    with pytest.raises(AttributeError, match=said):
        missing()


def test_a_default_runtime_that_died_is_replaced(monkeypatch):
    from scripted_scheduler import ScriptedBackend

    import plait.lang.backends.default_backend as backends
    from plait.runtime.process import runtime as launch

    started = []

    def runtime(**settings):
        started.append(ScriptedBackend())
        return started[-1]

    monkeypatch.setattr(launch, "Runtime", runtime)
    monkeypatch.setattr(backends, "_embedded", None)
    plait.set_default_backend(None)
    qa.run("a")
    qa.run("a")
    assert len(started) == 1
    started[0].scheduler.die("killed")
    qa.run("a")
    assert len(started) == 2
    with pytest.raises(plait.ProgramError, match="killed"):
        qa.run("a", backend=started[0])
    assert len(started) == 2
