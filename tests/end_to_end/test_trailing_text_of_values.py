"""A constrained gen in mid sentence on the embedded model: the text behind it belongs to its constraint."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
from asgi_server import serve_app
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from straight_line_programs import check_all_run_modes

import plait
from plait import assistant, gen, user
from plait.constrained import Regex
from plait.runtime.client.session import Session
from plait.runtime.sampling_params import sampling_params
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings
from plait.testing import Recording, Replay

KINDS = {
    "integer": "-?(?:0|[1-9][0-9]{0,17})",
    "float": r"(?:0|[1-9][0-9]{0,3})(?:\.[0-9]{1,3})?",
    "word": "[a-z]{1,12}",
    "quoted": '"[A-Za-z ]{1,20}"',
    "choice": "red|blue|green|blueish",
}
BEHIND = [" legs.", " km away", ", and", "% of it", ";\n", ") is", " (or so)"]


@pytest.fixture(scope="module")
def server(exact):
    app = create_app(exact, server_settings())
    limits = httpx.Limits(max_keepalive_connections=0)  # the server closes idle ones
    with serve_app(app) as address, httpx.Client(base_url=address, timeout=60, limits=limits) as client:
        yield client


def run(exact, make, **options):
    @plait.function
    def program(s):
        s += make()

    return program.run(backend=exact, **{"temperature": 0, **options})


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(BEHIND), st.integers(0, 9))
def test_a_value_is_what_one_pattern_of_value_and_text_gives(exact, kind, behind, seed):
    """With a text that cannot be a part of the value, the two constraints allow the same tokens at each step."""
    pattern, prompt = KINDS[kind], "The farmer said that he had seen "
    params = sampling_params(temperature=0.8, seed=seed, max_tokens=40)
    value = run(exact, lambda: prompt + gen("a", regex=pattern, max_tokens=40) + behind, temperature=0.8, seed=seed)
    session = exact.client.open_session()
    session.append(prompt)
    reference = session.generate(params, Regex(f"(?:{pattern}){re.escape(behind)}")).result()
    session.close()
    assert value.text() == prompt + value["a"] + behind == prompt + reference.text
    assert re.fullmatch(pattern, value["a"])
    assert value.get_meta_info("a")["finish_reason"] == {"type": "stop", "matched": None}


@pytest.mark.parametrize(
    ("make", "is_value"),
    [
        (lambda: "Pi is " + gen("a", type=float) + ".", lambda value: isinstance(value, float)),
        (lambda: "The speed is " + gen("a", type=int) + "0 km.", lambda value: isinstance(value, int)),
        (lambda: "Is the sky blue? " + gen("a", type=bool) + ", I think", lambda value: isinstance(value, bool)),
        (
            lambda: "A person: " + gen("a", type=list[int], max_tokens=30) + ", and more",
            lambda value: all(isinstance(item, int) for item in value),
        ),
        (
            lambda: "I saw a " + gen("a", ebnf='root ::= [a-z]{2,12}', max_tokens=12) + " in the park.",
            lambda value: value.isalpha(),
        ),
        (
            lambda: "I saw a " + gen("a", lark="start: /[a-z]{2,12}/", max_tokens=12) + " in the park.",
            lambda value: value.isalpha(),
        ),
    ],
)  # fmt: skip
def test_every_kind_of_constraint_takes_the_text_behind_it(exact, make, is_value):
    """The text of the state is exact, streamed or not, and the pieces of the value are the value's alone."""
    state, parts = run(exact, make), make().parts
    assert is_value(state["a"])
    assert state.text() == parts[0].text + state.text_of("a") + parts[2].text
    streamed = run(exact, make, stream=True)
    assert "".join(streamed.text_iter("a")) == state.text_of("a")
    assert "".join(streamed.text_iter()) == state.text()


def test_a_bird_has_few_legs(exact):
    """Without the text behind it, the number goes on for eighteen digits."""
    legs = run(exact, lambda: "A bird has " + gen("legs", type=int) + " legs. A dog has " + gen("more", type=int))
    assert legs["legs"] < 10**6 < legs["more"]
    usage = legs.get_meta_info("legs")
    assert usage["completion_tokens"] == len(str(legs["legs"]))


def test_logprobs_samples_and_a_limit(exact):
    def value(**options):
        return lambda: "A bird has " + gen("a", regex="[0-9]{1,18}", **options) + " legs." + gen(max_tokens=2)

    plain = run(exact, value())
    scored = run(exact, value(return_logprob=True))
    tokens = [text for _, _, text in scored.get_meta_info("a")["output_token_logprobs"]]
    assert "".join(tokens) == scored["a"] == plain["a"]
    assert scored.text() == plain.text()
    sampled = run(exact, value(n=3), temperature=1, seed=1)
    assert sampled.text().startswith(f"A bird has {sampled['a'][0]} legs.")
    assert all(text.isdigit() for text in sampled["a"])
    cut = run(exact, value(max_tokens=1))
    assert cut.text().startswith(f"A bird has {cut['a']} legs.") and len(cut["a"]) == 1
    assert cut.get_meta_info("a")["finish_reason"]["type"] == "length"
    stopped = run(exact, value(stop=plain["a"][-1]))
    assert stopped.text().startswith(f"A bird has {plain['a'].partition(plain['a'][-1])[0]} legs.")


IN_ONE_EXPRESSION = ("expression", [
    ("text", "A bird has "), ("gen", "a", {"regex": "[0-9]{1,6}"}), ("text", " legs and "),
    ("gen", "b", {"regex": "[0-9]{1,6}", "max_tokens": 3}), ("arg",), ("text", " wings and flies far away over seas"),
])  # fmt: skip
PROGRAM = [
    ("text", "Say: "),
    IN_ONE_EXPRESSION,
    ("gen", "alone", {"regex": "[a-c]{1,3}"}),
    ("text", " is not part of it"),
    ("fork", "concate_and_append", [[IN_ONE_EXPRESSION], [("text", "No "), IN_ONE_EXPRESSION]]),
    ("whole turn", [("text", "It has "), ("gen", "c", {"regex": "[0-9]{1,6}"}), ("text", " legs")]),
    ("gen", "last", {}),
]


def test_all_run_modes_give_the_same_texts(exact, server):
    check_all_run_modes(PROGRAM, exact, server, temperature=1, seed=3, max_tokens=8)


def test_a_program_of_the_server_takes_the_texts_behind_a_gen(exact, server):
    """By default all texts and request variables, and the end of the turn; with following_nodes as many as it says."""
    gen_node = {"name": "a", "regex": "[0-9]{1,18}", "temperature": 0}

    def posted(**options):
        nodes = [{"text": "A bird has "}, {"gen": gen_node | options}, {"var": "what"}, {"text": "."}]
        answer = server.post("/v1/programs", json={"program": nodes, "variables": {"what": " legs"}})
        assert answer.status_code == 200, answer.text
        return answer.json()["variables"]["a"], answer.json()["text"]

    number, text = posted()
    assert text == f"A bird has {number} legs." and len(number) < 5
    assert (number, text) == posted(following_nodes=2) == posted(following_nodes=1)
    alone, alone_text = posted(following_nodes=0)
    assert alone_text == f"A bird has {alone} legs." and len(alone) == 18
    refused = server.post("/v1/programs", json={"program": [{"text": "a"}, {"gen": {"following_nodes": 1}}]})
    assert refused.status_code == 400 and "following_nodes" in json.dumps(refused.json())


def test_a_plain_text_template_s_turn_end_belongs_to_the_value(exact, monkeypatch):
    """A template without control tokens ends a turn with text; it is what must be able to follow."""
    from plait.runtime.tokenizer.chat_template import ChatTemplate

    source = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} --\n{% endfor %}"
    monkeypatch.setattr(exact.client.tokenizer, "chat_template", ChatTemplate(source, "", ""))
    texts, generate = [], Session.generate
    monkeypatch.setattr(Session, "generate", lambda *given: texts.append(given[3:]) or generate(*given))
    state = run(exact, lambda: user("How many legs has a bird?") + assistant("It has " + gen("a", regex="[0-9]{1,4}")))
    assert state.text().endswith(f"It has {state['a']} --\n")
    assert texts == [(" --\n",)]


def test_recordings_replay_values_with_text_behind_them(exact, tmp_path):
    @plait.function
    def program(s):
        s += "A bird has " + gen("a", type=int) + " legs and "
        s += gen("b", max_tokens=3)

    with Recording(tmp_path / "bird.jsonl", exact):
        recorded = program.run(temperature=0)
        recorded.sync()
    with Replay(tmp_path / "bird.jsonl"):
        replayed = program.run(temperature=0)
        assert (replayed["a"], replayed["b"], replayed.text()) == (recorded["a"], recorded["b"], recorded.text())


def test_an_async_body_and_a_call_after_joined_text(exact):
    """Instructions that wait for joined text take the text behind a value, too."""

    @plait.function
    async def program(s):
        s += "Birds."
        forks = s.fork(2)
        forks += lambda i: gen("x", regex=r" It has two legs\.")  # what the forks say decides the number
        await forks.join("concate_and_append")
        s += " A bird has " + gen("a", type=int) + " legs."

    state = asyncio.run(program.arun(backend=exact, temperature=0))
    assert state.text().endswith(f" A bird has {state['a']} legs.")
    assert state["a"] < 10**6
