"""`compile()`: the graph is what the body does, what is wrong is found before anything runs, and the graph runs."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

import plait
from plait import assistant, gen, race, select, separate_reasoning, system, user
from plait.runtime.messages import Append, Fork, Generate, Select
from plait.runtime.server.protocols.programs.compiler import compile_program
from plait.runtime.server.protocols.programs.types import ProgramRequest

TOPICS = ["price", "quality"]


@plait.function
def review(s, text, k=2):
    s += system("You are terse.")
    s += user(f"A review: {text}\nWhat does it say?")
    s += assistant(gen("summary", max_tokens=40, stop="\n"))
    s += user("Is " + s["summary"] + " positive?")
    s += assistant(select("verdict", ["yes", "no"]))
    branches = s.fork(k)
    for branch, topic in zip(branches, TOPICS, strict=True):
        branch += user(f"And the {topic}?")
        branch += assistant(gen("detail", max_tokens=24))
    branches.join()
    s += user("Sum up: " + s["detail"][0] + "; " + s["detail"][1])
    s += assistant(gen("end"))


@pytest.fixture(autouse=True)
def no_runtime(monkeypatch):
    """Compiling needs no model; a test that runs something asks for `backend`."""
    import plait.lang.backends.default_backend as backends

    def refuse():
        raise AssertionError("compiling started a runtime")

    monkeypatch.setattr(backends, "_start_embedded", refuse)


def sent(backend):
    """What crossed the wire since the last look: for each session, in order, without ids."""
    found = {}
    for request in backend.scheduler.requests:
        if isinstance(request, Append):
            found.setdefault(request.session, []).append(("text", tuple(request.token_ids)))
        elif isinstance(request, Generate):
            found.setdefault(request.session, []).append(("gen", request.sampling, request.constraint))
        elif isinstance(request, Select):
            found.setdefault(request.session, []).append(("select", request.choices, request.method))
        elif isinstance(request, Fork):
            found.setdefault(request.session, []).append(("fork", len(request.children)))
    backend.scheduler.requests.clear()
    return [found[session] for session in sorted(found)]


def values(state):
    return {name: state.get_var(name) for name in state._branch.variables}


def same_run(backend, program, **arguments):
    """The graph sends what the body sends, and gives its variables and its text."""
    state = program.run(temperature=0, **arguments)
    by_body = sent(backend)
    again = program.compile(temperature=0).run(**arguments)
    assert sent(backend) == by_body
    assert (values(again), again.text()) == (values(state), state.text())
    return state


def of_body(body):
    return plait.function(body).compile()


# -- what it shows --------------------------------------------------------------------------------


def test_graph_text_has_the_keywords_of_gen():
    @plait.function
    def program(s):
        s += "p" + gen("a", logprob_start_len=0, return_logprob=True, top_logprobs_num=2, timeout=3)

    text = str(program.compile())
    words = ("logprob_start_len=0", "return_logprob=true", "top_logprobs_num=2", "timeout=3.0")
    assert set(words) <= set(text.split()), text


def test_the_graph_as_text():
    lines = str(review.compile(temperature=0)).splitlines()
    assert re.fullmatch(r"program review\(text\) at .*test_compile\.py:20", lines[0])
    assert [line.strip() for line in lines[1:]] == [
        "defaults temperature=0.0",
        *("system", '"You are terse."'),
        *("user", '"A review: "', "text", '"\\nWhat does it say?"'),
        *("assistant", 'gen summary max_tokens=40 stop=["\\n"]'),
        *("user", '"Is "', "s['summary']", '" positive?"'),
        *("assistant", 'select verdict ["yes", "no"]'),
        "fork into 2",
        *("branch 0", "user", '"And the price?"', "assistant", "gen detail max_tokens=24"),
        *("branch 1", "user", '"And the quality?"', "assistant", "gen detail max_tokens=24"),
        "join variables",
        *("user", '"Sum up: "', "s['detail'][0]", '"; "', "s['detail'][1]"),
        *("assistant", "gen end"),
    ]


def test_the_graph_as_mermaid():
    drawn = review.compile("nice").mermaid()
    lines = drawn.splitlines()
    assert lines[0] == "flowchart TD"
    (forked,) = re.findall(r"(n\d+)\{\{\"fork into 2\"\}\}", drawn)
    (joined,) = re.findall(r"(n\d+)\{\{\"join variables\"\}\}", drawn)
    assert drawn.count(f"{forked} --> ") == 2 and drawn.count(f" --> {joined}") == 2
    first, second = re.findall(r"(n\d+)\(\"gen detail max_tokens=24\"\)", drawn)
    assert f'{first} -. "detail" .-> ' in drawn and f'{second} -. "detail" .-> ' in drawn
    assert re.search(r'n\d+ -\. "summary" \.-> n\d+', drawn)
    boxes = [line for line in lines if re.match(r"  n\d+[\[({]", line)]
    assert boxes and all(re.fullmatch(r"  n\d+[\[({/]+\"[^\"<>`]*\"[\])}/]+", line) for line in boxes)


def test_where_an_argument_goes():
    assert '  start -. "text" .-> n' in review.compile().mermaid()
    assert "start -." not in review.compile("nice").mermaid()


# -- what it runs ---------------------------------------------------------------------------------


@plait.function
def sampler(s, count):
    s += "p" + gen("many", n=3, seed=4, temperature=1.0)
    s += ", ".join(f"{each}" for each in s["many"])
    s += "|" + s["many"][1].strip().upper() + f" of {count:>3}"
    with s.var_scope("scope"):
        s += " it is " + gen("age", type=int) + "."
    s["doubled"] = s["age"] * 2 + 1
    s += f"{s['doubled']} {s['scope']}" + gen("more")
    forks = s.fork(2)
    forks += lambda i: f"({i})" + gen("idea")
    forks.join("concate_and_append")
    with s.copy() as t:
        t += "?" + gen("thought")
    s += s["thought"][0] + s.get_meta_info("more")["finish_reason"]["type"]
    s += separate_reasoning(gen("answer"), model_type="qwen3")
    s += s["answer_reasoning_content"] + s["answer"] + select("done", ["yes", "no"])


def test_the_graph_runs_as_the_body_does(backend):
    backend.script((" it is ", "42"), ("yes", "<think>so</think>ok"), default=" fine.")
    backend.scheduler.answer = lambda prompt, request: "7" if request.constraint else "<think>so</think> ok"
    state = same_run(backend, sampler, count=5)
    assert state["doubled"] == 15 and " of   5" in state.text()
    same_run(backend, review, text="Great.")


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@plait.function
def agent(s, task):
    s += system("Use tools.", tools=[add]) + user(task)
    s += assistant(gen("step", tools=[add]))
    s += user(f"You got {s.call('step').value}.")
    s += assistant(gen("answer"))
    return s.text()


def test_tools_are_run_by_the_graph_and_not_by_compile(backend):
    backend.scheduler.answer = lambda prompt, request: (
        '{"name":"add","arguments":{"a":1,"b":2}}' if request.constraint else "3"
    )
    graph = agent.compile()
    assert "run the tool of step" in str(graph) and "s.call('step').value" in str(graph)
    assert "You got 3." in same_run(backend, agent, task="1+2").text()


def test_winners_of_a_race(backend):
    @plait.function
    def racing(s):
        s += "p"
        forks = s.fork(3)
        forks += gen("x")
        race(forks, first=2).join()
        s += s["x"][1]

    assert len(same_run(backend, racing)["x"]) == 2
    assert "join variables, the first 2 of a race" in str(racing.compile())


def test_async_bodies(backend):
    @plait.function
    async def later(s, q):
        s += "Q: " + q + gen("a")
        forks = s.fork(2)
        forks += gen("b")
        await forks.join()
        s += (await s["a"]) + (await s["b"])[0]
        async for piece in s.stream("a"):
            s += piece
        s += await s.text_of("a")

    graph = later.compile()
    state = graph.run(q="why?")
    assert state.text() == later.run(q="why?").text()

    async def inside():
        later.compile()

    with pytest.raises(plait.InputError, match="an event loop runs in this thread: compile the program outside"):
        asyncio.run(inside())


def test_programs_in_programs(backend):
    @plait.function
    def inner(s, word):
        s += f"[{word}]" + gen("inner")
        return s["inner"]

    @plait.function
    def outer(s, word):
        s += "p"
        s += inner(s, word) + "."

    same_run(backend, outer, word="w")


def test_combinators(backend):
    @plait.function
    def mapped(s):
        s += "p"
        plait.map(s, ["a", "b"], lambda branch, item: branch.user(item) or branch.assistant(gen("x")))
        s += s["x"][1]

    same_run(backend, mapped)

    @plait.function
    def voting(s):
        s += "p"
        plait.vote(s, 3, gen("x"), "x")

    with pytest.raises(plait.DependsOnValue, match=r"s\['x'\]\.strip\(\), a value known at run time only"):
        voting.compile()


def test_arguments_of_a_graph(backend):
    graph = review.compile("nice")
    assert graph.parameters == () and "A review: nice" in graph.run().text()
    with pytest.raises(plait.InputError, match="no argument 'text'; it takes none"):
        graph.run(text="x")
    with pytest.raises(plait.InputError, match=r"no argument 'txt' \(did you mean 'text'\?\); its arguments are text"):
        review.compile().run(txt="x")
    with pytest.raises(plait.InputError, match="the argument 'text' is missing"):
        review.compile().run()
    assert review.bind(text="bound").compile().parameters == ()


def test_a_call_that_fails_names_the_programs_own_line(backend):
    from plait.runtime.errors import DeadlineExceeded

    backend.scheduler.answer = lambda prompt, request: DeadlineExceeded("took longer than 1 s")
    with pytest.raises(plait.ProgramError, match="variable 'x': DeadlineExceeded") as caught:
        plait.function(contradiction).compile(max_tokens=1000).run()
    assert line_at(caught.value.place) == "# here"


# -- what it costs --------------------------------------------------------------------------------


def test_a_body_is_carried_out_once_and_asks_nothing(backend):
    times = []

    @plait.function
    def counted(s):
        times.append(1)
        s += "p" + gen("x")

    graph = counted.compile()
    assert len(times) == 1 and backend.scheduler.requests == []
    graph.run()
    assert len(times) == 1
    counted.run_batch([{}] * 5)
    assert len(times) == 6  # once for each item, and not once more


def test_a_compiled_program_is_no_run_that_is_watched():
    from plait.lang.spans.call_spans import collect_runs

    with collect_runs() as runs:
        review.compile()
    assert runs == []


# -- what it finds --------------------------------------------------------------------------------


def read_unknown(s):
    s += "p" + gen("answer")
    s += s["anwser"]  # here


def bad_regex(s):
    s += "p"
    s += gen("x", regex="([")  # here


def bad_lark(s):
    s += "p" + gen("y")
    s += gen("x", lark="start: missing")  # here


def bad_schema(s):
    s += "p"
    s += gen("x", json_schema={"type": "string", "format": "nonsense"})  # here


def bad_schema_text(s):
    s += "p" + gen("x", json_schema="{")  # here


def contradiction(s):
    s += "p" + gen("x", min_tokens=900)  # here


def lost_fork(s):
    s += "p"
    forks = s.fork(2)  # here
    forks += gen("x")


def lost_inner_fork(s):
    s += "p"
    forks = s.fork(2)
    for fork in forks:
        fork.fork(1)[0].user("lost")  # here
    forks.join()


def empty_prompt(s):
    s += gen("x")  # here


def open_turn(s):
    s += user("a") + "x"
    s.user_begin()
    s += user("b")  # here


def after_join(s):
    s += "p"
    forks = s.fork(2)
    forks.join()
    forks[0] += "more"  # here


def raises(s):
    s += "p" + gen("x")
    {}["key"]  # here


def own_error(s):
    s += "p" + gen("x")
    raise LookupError("Unknown topic")  # here


def wrong_value(s):
    s += "p" + gen("n", type=int)
    s += s["n"]  # here


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (read_unknown, r"there is no variable 'anwser' \(did you mean 'answer'\?\); it has 'answer'"),
        (bad_regex, r"gen\('x'\): the regex '\(\[' is not valid"),
        (bad_lark, r"gen\('x'\): the constraint cannot be used: .*missing"),
        (bad_schema, r"gen\('x'\): the constraint cannot be used: .*nonsense"),
        (bad_schema_text, r"gen\('x'\): the json_schema cannot be used"),
        (contradiction, r"min_tokens \(900\) is above max_tokens"),
        (lost_fork, "the 2 branches of this fork are never used"),
        (lost_inner_fork, "this fork is never used"),
        (empty_prompt, "the prompt is empty: add text before gen"),
        (open_turn, "a user turn cannot begin inside the user turn"),
        (after_join, "this branch was joined; its state can be read, not extended"),
        (raises, "the body raised KeyError: 'key'"),
        (own_error, "the body raised LookupError: Unknown topic"),
        (wrong_value, r"only text and expressions can be appended, not int; write str\(...\)"),
    ],
)
def test_what_is_wrong_is_found_and_its_line_named(body, said):
    with pytest.raises(plait.CompileError, match=said) as caught:
        of_body(body)
    assert line_at(caught.value.place) == "# here"
    assert str(caught.value).endswith(f"test_compile.py:{caught.value.place.lineno})")


def line_at(place):
    with open(place.filename, encoding="utf-8") as file:
        return "# " + file.read().splitlines()[place.lineno - 1].rpartition("# ")[2]


def test_all_problems_are_said_at_once():
    def body(s):
        s += "p" + gen("a", lark="start: one")
        s += gen("b", lark="start: two")
        s.fork(2)

    with pytest.raises(plait.CompileError) as caught:
        of_body(body)
    first = body.__code__.co_firstlineno
    assert [each.place.lineno - first for each in caught.value.problems] == [1, 2, 3]
    assert len(str(caught.value).splitlines()) == 3


def test_a_fork_that_is_read_or_returned_is_not_lost():
    def reads(s):
        s += "p"
        forks = s.fork(2)
        forks += gen("x")
        s += forks[0]["x"]

    def returns(s):
        s += "p"
        forks = s.fork(2)
        forks += gen("x")
        return forks[1]

    assert of_body(reads) and of_body(returns)


def test_turns_that_the_models_template_refuses(backend):
    from scripted_scheduler import ScriptedBackend

    strict = ScriptedBackend(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )

    def body(s):
        s += system("a")

    assert of_body(body)
    with pytest.raises(plait.CompileError, match="no system role"):
        plait.function(body).compile(backend=strict)


# -- what it cannot follow ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda s, a: 1 if s["x"] else 2, r"depends on s\['x'\], .*: it is used as a condition"),
        (lambda s, a: s["x"] == "yes", "it is compared with 'yes'"),
        (lambda s, a: s["x"] == "yes", r"\(at .*test_compile.py:\d+\)"),
        (lambda s, a: s["x"].lower() != "yes", r"depends on s\['x'\]\.lower\(\)"),
        (lambda s, a: s["x"] in ("yes", "no"), "is compared with 'yes'"),
        (lambda s, a: s["x"] in {"yes": 1}, "looked up in a dict"),
        (lambda s, a: "y" in s["x"], "searched with in"),
        (lambda s, a: s["x"] in "yes no", "where a known value is needed"),
        (lambda s, a: len(s["x"]), "measured with len"),
        (lambda s, a: list(s["x"]), "iterated over"),
        (lambda s, a: int(s["x"]), "converted to a number"),
        (lambda s, a: range(s["x"]), "used as a count or an index"),
        (lambda s, a: re.match("a", s["x"]), "where a known value is needed"),
        (lambda s, a: ", ".join([s["x"]]), r"is used .* needed: .*; inside a text write f'\{value\}'"),
        (lambda s, a: json.loads(s["x"]), "where a known value is needed"),
        (lambda s, a: json.loads(f"{s['x']}"), None),
        (lambda s, a: int(f"{s['x']}"), r"known value is needed: .*\{s\['x'\]\}"),
        (lambda s, a: s.__iadd__(f"Is it {s['x']}"[:9]), "was cut, stripped, split"),
        (lambda s, a: s.__iadd__(f"Is it {s['x']}".strip()), "was cut, stripped, split"),
        (lambda s, a: s.__iadd__(f"Is it {s['x']}".upper()), "was cut, stripped, split"),
        (lambda s, a: [s.__iadd__(word) for word in f"Is it {s['x']}?".split()], "was cut, stripped, split"),
        (lambda s, a: [s.__iadd__(each) for each in a], r"depends on a, .*; give it to compile: compile\(a=\.\.\.\)"),
        (lambda s, a: s.__iadd__(select("c", a)), "it is iterated over; give it"),
        (lambda s, a: s.__iadd__(gen("c", max_tokens=a)), "known value is needed: .*max_tokens"),
        (lambda s, a: s.fork(a), "known value is needed: fork takes a number"),
        (lambda s, a: a > 3, r"it is compared with 3; give it to compile: compile\(a=\.\.\.\)"),
        (lambda s, a: s.text() == "", "depends on the text of s"),
        (lambda s, a: s.usage.calls > 3, r"depends on the usage of s\.calls"),
        (lambda s, a: race(s.fork(2))[0], "which branch wins a race"),
    ],
)
def test_what_hangs_on_a_value_is_refused(use, said):
    def body(s, a):
        s += "p" + gen("x")
        use(s, a)

    with pytest.raises(plait.CompileError if said is None else plait.DependsOnValue, match=said) as caught:
        of_body(body)
    assert caught.value.place.filename == __file__


def test_a_refusal_cannot_be_caught_by_the_body():
    def body(s):
        s += "p" + gen("x")
        try:
            s += "yes" if s["x"] == "a" else "no"
        except Exception:
            s += "no"

    with pytest.raises(plait.DependsOnValue, match="compared with 'a'"):
        of_body(body)


def test_a_mark_in_a_users_text_is_only_text():
    graph = of_body(lambda s: s.__iadd__("NotKnown aZ0 " + gen("x")))
    assert '"NotKnown aZ0 "' in str(graph)


# -- as a request ---------------------------------------------------------------------------------


def compiled_by_the_server(graph, **arguments):
    import msgspec

    request = graph.json(**arguments)
    body = msgspec.json.decode(json.dumps(request).encode(), type=ProgramRequest)
    return compile_program(body, 128)


def test_the_request_of_a_straight_line_program():
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
    assert compiled_by_the_server(graph, text="x")


def test_arguments_that_are_left_open_are_variables():
    request = review.compile().json()
    assert {"var": "text"} in request["program"][1]["content"]
    with pytest.raises(plait.InputError, match=r"no argument 'txt' \(did you mean 'text'\?\)"):
        review.compile().json(txt="a")
    with pytest.raises(plait.InputError, match="arguments of a request are text, not int"):
        review.compile().json(text=5)


def test_every_option_of_a_gen_is_in_the_request():
    from plait.constrained.specs import JsonObject

    @plait.function
    def program(s):
        s += "p" + gen("a", 5, 2, n=2, stop=["x", "y"], stop_token_ids=[3], temperature=0.5, top_p=0.9, top_k=4)
        s += gen("b", min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3, ignore_eos=True, seed=7, timeout=9)
        s += gen("c", return_logprob=True, top_logprobs_num=2, regex="a+") + gen("d", ebnf='root ::= "a"')
        s += gen("e", lark='start: "a"') + gen("f", json_schema={"type": "integer"}, complete=True)
        s += gen("g", constraint=JsonObject()) + gen("h", choices=["a", "b"], temperature=1) + gen("i", type=bool)
        s += select("j", ["a", "b"], choices_method=plait.greedy_token_selection, timeout=3) + s["a"][1]

    steps = compiled_by_the_server(program.compile())
    found = {step.name: step for step in steps[1:-1]}
    a, b, c = (found[name].sampling for name in "abc")
    assert (a.max_tokens, a.min_tokens, a.stop, a.stop_token_ids, found["a"].n) == (5, 2, ("x", "y"), (3,), 2)
    assert (a.temperature, a.top_p, a.top_k, b.min_p, b.frequency_penalty) == (0.5, 0.9, 4, 0.1, 0.2)
    assert (b.presence_penalty, b.ignore_eos, b.seed, b.timeout_s, c.logprobs, c.top_logprobs) == (
        *(0.3, True, 7, 9.0),
        *(True, 2),
    )
    assert [type(found[name].constraint).__name__ for name in "cdefghi"] == [
        *("Regex", "Ebnf", "Lark", "JsonSchema", "JsonObject", "Choices", "Choices")
    ]
    assert found["f"].sampling.complete
    assert (found["j"].method, found["j"].timeout_s) == ("greedy_token_selection", 3.0)
    assert steps[-1].index == (1,)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda s: s.__iadd__(s["x"].strip()), r"the value of s\['x'\]\.strip\(\) is computed from other values"),
        (lambda s: s.set_var("y", 1), "the body sets a variable"),
        (lambda s: s.var_scope("y").__enter__(), "var_scope"),
        (lambda s: [s.fork(2)[0].sync(), s.__iadd__("y")], "between a fork and its join"),
        (lambda s: s.fork(2)[0].sync(), "the branches of a fork are never joined"),
        (lambda s: s.user_begin(), "a turn is not closed"),
        (lambda s: s.text(), "the text of a state is read"),
        (lambda s: s.__iadd__(gen("t", tools=[add])), "tools and separate_reasoning"),
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
def test_what_has_no_form_there_says_why(write, why):
    def body(s):
        s += "p" + gen("x")
        write(s)

    graph = of_body(body)
    assert not graph.is_straight
    with pytest.raises(plait.CompileError, match=f"not a straight-line program: .*{why}") as caught:
        graph.json()
    assert caught.value.place.filename == __file__


def test_a_program_without_calls_has_no_request():
    with pytest.raises(plait.CompileError, match="neither gen nor select"):
        of_body(lambda s: s.__iadd__("p")).json()


# -- SGLang's names -------------------------------------------------------------------------------


def test_trace_and_cache(backend):
    assert str(review.trace(text="a")) == str(review.compile(text="a"))
    computed = review.cache()
    (session,) = sent(backend)
    text = "<<|im_start|>>system\nYou are terse.<<|im_end|>>\n<<|im_start|>>user\nA review: "
    assert backend.scheduler.text(session[0][1]) == text
    assert session[1][1].max_tokens == 0 and computed == len(session[0][1])
    assert backend.scheduler.open_sessions() == 0

    @plait.function
    def nothing_shared(s, a):
        s += a + gen("x")

    assert nothing_shared.cache() == 0 and sent(backend) == []
