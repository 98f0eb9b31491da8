"""Random straight-line programs, and all the ways in which one can be run.

A program is a list of steps, each a tuple of its name and what it takes; `execute_steps` carries them out as a body
would.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator

from hypothesis import strategies as st

import plait
from plait import assistant, gen, select

TOPICS = ["bread", "the sea"]
WORDS = st.sampled_from(["The ", "It is ", " and ", ", so ", "\n", " 1, 2, ", "é "])
GENS = st.sampled_from(
    [{}, {"max_tokens": 1}, {"stop": [" a", "\n"]}, {"regex": "[a-c]{1,2}"}, {"n": 2}, {"choices": ["yes", "no"]}]
)


@st.composite
def programs(draw, most=4):
    """Begins with text and ends with a gen; `most` steps between them, and less within turns and forks."""
    return [("text", "Say: "), *draw_steps(draw, {}, most, depth=0), ("gen", "last", {})]


def draw_steps(draw, scope, most, depth, in_turn=False):
    """`scope`: name -> nothing for a text, or how many items a list has; it learns the new names."""
    kinds = ["text", "arg", "gen", "select", *(["value"] if scope else [])]
    kinds += ["turn"] * (not in_turn) + ["fork"] * (depth < 1)
    steps = []
    for _ in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(kinds))
        if kind == "text":
            steps.append((kind, draw(WORDS)))
        elif kind == "gen":
            name, options = draw(st.sampled_from("abc")), draw(GENS)
            scope[name] = [None] * options["n"] if "n" in options else None
            steps.append((kind, name, options))
        elif kind == "select":
            scope["d"] = None
            steps.append((kind, "d", draw(st.sampled_from([["yes", "no"], ["good", "bad", "so so"]]))))
        elif kind == "value":
            steps.append((kind, *draw_path(draw, scope)))
        elif kind == "turn":
            steps.append((kind, draw(st.sampled_from("su")), draw_steps(draw, scope, 2, depth, in_turn=True)))
        elif kind == "fork":
            steps.append(draw_fork(draw, scope, depth, in_turn))
        else:
            steps.append((kind,))
    return steps


def draw_path(draw, scope):
    name, path = draw(st.sampled_from(sorted(scope))), []
    shape = scope[name]
    while shape is not None:
        path.append(draw(st.integers(0, len(shape) - 1)))
        shape = shape[path[-1]]
    return name, path


def draw_fork(draw, scope, depth, in_turn):
    before, gathered, branches = set(scope), {}, []
    for _ in range(2):
        own = dict(scope)
        branches.append(draw_steps(draw, own, 2, depth + 1, in_turn))
        for name in own.keys() - before:
            gathered.setdefault(name, []).append(own[name])
    mode = draw(st.sampled_from(["gather_variable", "concate_and_append"]))
    if mode == "gather_variable":
        scope.update(gathered)
    return ("fork", mode, branches)


def execute_steps(s, steps, topic):
    """Carries the steps out, as a plain body would."""
    for step in steps:
        match step:
            case ("value", name, path):
                value = s[name]
                for index in path:
                    value = value[index]
                s += value
            case ("turn", role, inner):
                with s.user() if role == "u" else s.assistant():
                    execute_steps(s, inner, topic)
            case ("fork", mode, branches):
                group = s.fork(len(branches))
                for branch, inner in zip(group, branches, strict=True):
                    execute_steps(branch, inner, topic)
                group.join(mode)
            case _:
                s += simple(step, topic)


async def execute_steps_async(s, steps, topic):
    """`execute_steps` as an async body would."""
    for step in steps:
        match step:
            case ("value", name, path):
                value = await s[name]
                for index in path:
                    value = value[index]
                s += value
            case ("turn", role, inner):
                with s.user() if role == "u" else s.assistant():
                    await execute_steps_async(s, inner, topic)
            case ("fork", mode, branches):
                group = s.fork(len(branches))
                for branch, inner in zip(group, branches, strict=True):
                    await execute_steps_async(branch, inner, topic)
                await group.join(mode)
            case _:
                s += simple(step, topic)


def simple(step, topic):
    match step:
        case ("text", text):
            return text
        case ("arg",):
            return "(" + topic + ")"
        case ("gen", name, options):
            return gen(name, **options)
        case ("select", name, choices):
            return select(name, choices)
        case ("expression", parts):
            return functools.reduce(operator.add, [simple(part, topic) for part in parts])
        case ("whole turn", parts):
            return assistant(simple(("expression", parts), topic))


def outcome(state):
    """Returns the variables, the text, and the numbers of tokens in the prompts and the answers of all calls."""
    variables = {name: state.get_var(name) for name in state._branch.variables}
    return variables, state.text(), state.usage.prompt_tokens, state.usage.completion_tokens


def check_all_run_modes(steps, backend, server, **sampling):
    """Asserts that the program gives the same variables, text and usage alone, in a batch, streamed, async, compiled,
    and over HTTP; `server` is an HTTP client of a server on the same model."""

    @plait.function
    def program(s, topic):
        execute_steps(s, steps, topic)

    @plait.function
    async def later(s, topic):
        await execute_steps_async(s, steps, topic)

    how, topic = {"backend": backend, **sampling}, TOPICS[0]
    expected = outcome(program.run(topic, **how))
    batch = program.run_batch([{"topic": topic} for topic in TOPICS], **how)
    assert outcome(batch[0]) == expected
    streamed = program.run(topic, stream=True, **how)
    assert "".join(streamed.text_iter()) == expected[1] and outcome(streamed) == expected
    assert outcome(asyncio.run(later.arun(topic, **how))) == expected
    graph = program.compile(**sampling)
    assert graph.is_straight
    assert graph.mermaid() == later.compile(**sampling).mermaid().replace("later(topic)", "program(topic)")
    assert outcome(graph.run(topic=topic, backend=backend)) == expected
    assert posted(server, graph.json(topic=topic)) == expected
    return program, graph, expected


def check_remaining_run_modes(steps, backend, server, **sampling):
    """`check_all_run_modes`, and the ways that differ from those in little."""
    program, graph, expected = check_all_run_modes(steps, backend, server, **sampling)
    how, topic = {"backend": backend, **sampling}, TOPICS[0]
    assert outcome(asyncio.run(program.arun(topic, **how))) == expected
    items = [{"topic": topic} for topic in TOPICS]
    one_by_one = [outcome(state) for state in program.run_batch(items, num_threads=1, **how)]
    assert [outcome(state) for state in asyncio.run(program.arun_batch(items, **how))] == one_by_one
    left_open = {**graph.json(), "variables": {"topic": topic}}
    assert posted(server, left_open) == (expected[0] | {"topic": topic}, *expected[1:])


def posted(server, request):
    answer = server.post("/v1/programs", json=json.loads(json.dumps(request)))
    assert answer.status_code == 200, answer.text
    body, usage = answer.json(), answer.json()["usage"]
    return body["variables"], body["text"], usage["prompt_tokens"], usage["completion_tokens"]
