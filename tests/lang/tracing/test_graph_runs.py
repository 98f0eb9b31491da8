"""A compiled graph sends what the body sends, gives the same state, and needs the body only once."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from compiled_programs import add, assert_graph_runs_like_body, review, sent
from tool_examples import call_text

import plait
from plait import assistant, gen, race, select, separate_reasoning, system, user


@plait.function
def sampler(s, count):
    s += "p" + gen("many", n=3, seed=4, temperature=1.0)
    s += ", ".join(f"{value}" for value in s["many"])
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


def test_graph_runs_like_the_body(backend):
    backend.script((" it is ", "42"), ("yes", "<think>so</think>ok"), default=" fine.")
    backend.scheduler.answer = lambda prompt, request: "7" if request.constraint else "<think>so</think> ok"
    state = assert_graph_runs_like_body(backend, sampler, count=5)
    assert state["doubled"] == 15 and " of   5" in state.text()
    assert_graph_runs_like_body(backend, review, text="Great.")


@plait.function
def agent(s, task):
    s += system("Use tools.", tools=[add]) + user(task)
    s += assistant(gen("step", tools=[add]))
    s += user(f"You got {s.call('step').value}.")
    s += assistant(gen("answer"))
    return s.text()


def test_graph_runs_tools_and_compile_does_not(backend):
    backend.scheduler.answer = lambda prompt, request: call_text("add", a=1, b=2) if request.constraint else "3"
    graph = agent.compile()
    assert "run the tool of step" in str(graph) and "s.call('step').value" in str(graph)
    assert "You got 3." in assert_graph_runs_like_body(backend, agent, task="1+2").text()


def test_graph_runs_a_race(backend):
    @plait.function
    def racing(s):
        s += "p"
        forks = s.fork(3)
        forks += gen("x")
        race(forks, first=2).join()
        s += s["x"][1]

    assert len(assert_graph_runs_like_body(backend, racing)["x"]) == 2
    assert "join variables, the first 2 of a race" in str(racing.compile())


def test_graph_of_an_async_program_runs_like_it(backend):
    @plait.function
    async def async_program(s, q):
        s += "Q: " + q + gen("a")
        forks = s.fork(2)
        forks += gen("b")
        await forks.join()
        s += (await s["a"]) + (await s["b"])[0]
        async for piece in s.stream("a"):
            s += piece
        s += await s.text_of("a")

    graph = async_program.compile()
    state = graph.run(q="why?")
    assert state.text() == async_program.run(q="why?").text()

    async def inside():
        async_program.compile()

    with pytest.raises(plait.InputError, match="an event loop runs in this thread: compile the program outside"):
        asyncio.run(inside())


def test_graph_includes_nested_programs(backend):
    @plait.function
    def inner(s, word):
        s += f"[{word}]" + gen("inner")
        return s["inner"]

    @plait.function
    def outer(s, word):
        s += "p"
        s += inner(s, word) + "."

    assert assert_graph_runs_like_body(backend, outer, word="w").text() == "p[w] fine. fine.."


def test_map_compiles_and_vote_depends_on_values(backend):
    @plait.function
    def mapped(s):
        s += "p"
        plait.map(s, ["a", "b"], lambda branch, item: branch.user(item) or branch.assistant(gen("x")))
        s += s["x"][1]

    assert_graph_runs_like_body(backend, mapped)

    @plait.function
    def voting(s):
        s += "p"
        plait.vote(s, 3, gen("x"), "x")

    with pytest.raises(plait.DependsOnValue, match=r"s\['x'\]\.strip\(\), a value known at run time only"):
        voting.compile()


def test_graph_checks_its_arguments(backend):
    graph = review.compile("nice")
    assert graph.parameters == () and "A review: nice" in graph.run().text()
    with pytest.raises(plait.InputError, match="no argument 'text'; it takes none"):
        graph.run(text="x")
    with pytest.raises(plait.InputError, match=r"no argument 'txt' \(did you mean 'text'\?\); its arguments are text"):
        review.compile().run(txt="x")
    with pytest.raises(plait.InputError, match="the argument 'text' is missing"):
        review.compile().run()
    assert review.bind(text="bound").compile().parameters == ()


def test_compile_executes_the_body_once_and_sends_nothing(backend):
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
    assert len(times) == 6  # once per item


def test_compile_is_not_collected_as_a_run():
    from plait.lang.spans.call_spans import collect_runs

    with collect_runs() as runs:
        review.compile()
    assert runs == []


def test_trace_returns_the_graph_and_cache_computes_the_constant_prefix(backend):
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


def test_scopes_of_one_name_in_another(backend):
    """The inner one may also be left by an exception, which is no end of a scope."""

    @plait.function
    def scopes(s):
        s += "p"
        with s.var_scope("x"):
            s += "1"
            with s.var_scope("x"):
                s += "2" + gen("a")
            s += "<" + s["x"] + ">"
            with contextlib.suppress(ValueError), s.var_scope("x"):
                s += "3" + gen("b")
                raise ValueError
        s += "[" + s["x"] + "]"

    backend.script(("p12", "A"), ("3", "B"))
    assert assert_graph_runs_like_body(backend, scopes).text() == "p12A<2A>3B[12A<2A>3B]"


def test_text_of_samples_is_that_of_the_first(backend):
    @plait.function
    def samples(s):
        s += "p" + gen("many", n=2, seed=4, temperature=1.0)
        s += "|" + s.text_of("many")

    backend.script(default="x")
    assert assert_graph_runs_like_body(backend, samples).text() == "px|x"
