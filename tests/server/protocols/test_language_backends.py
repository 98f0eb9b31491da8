"""The language's backends with a real server, over SGLang's, OpenAI's and Anthropic's protocols.

The server is deterministic, so a greedy program has equal values over all of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Literal

import httpx
import openai
import pytest

import plait
from plait import assistant, gen, select, system, user

pytestmark = pytest.mark.timeout(120)
QUESTION = "What is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def chats(real_address):
    backends = [
        plait.OpenAI("default", f"{real_address}/v1"),
        plait.Anthropic("default", base_url=real_address, api_key="none", max_retries=0),
    ]
    yield backends
    for backend in backends:
        backend.close()


@pytest.fixture(params=[0, 1], ids=["OpenAI", "Anthropic"])
def chat(chats, request):
    return chats[request.param]


@plait.function
def talk(s, question):
    s += system("Be brief.") + user(question)
    s += assistant(gen("answer", max_tokens=12))
    s += user("Sure?") + assistant(select("sure", ["yes", "no"]))


def test_conversation_is_equal_over_every_protocol(endpoint, chats):
    states = [talk.run(QUESTION, backend=backend, temperature=0) for backend in (endpoint, *chats)]
    assert len({state["answer"] for state in states}) == 1 and "Paris" in states[0]["answer"]
    assert states[0].get_meta_info("sure")["choice_scores"][0] < 0
    for state in states[1:]:
        meta = state.get_meta_info("sure")
        assert meta["method"] == "structured output" and meta["choice_scores"] is None
        assert state["sure"] == states[1]["sure"] in ("yes", "no")
        assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    for state in states:
        usage = state.get_meta_info("answer")
        assert (
            usage["completion_tokens"] > 3
            and usage["prompt_tokens"] == states[0].get_meta_info("answer")["prompt_tokens"]
        )
        assert usage["finish_reason"]["type"] == "stop"


# -- SGLang's protocol ----------------------------------------------------------------------------


def run_gen(expr, prompt="The capital of France is", **keywords):
    @plait.function
    def program(s):
        s += prompt + expr

    return program.run(**keywords)


def test_branches_samples_streams_and_batches(endpoint):
    @plait.function
    def program(s, q):
        forks = s.fork(2)  # before any text
        forks += lambda i: f"{q} {i}:" + gen("tip", max_tokens=4)
        forks.join()
        s += q + gen("x", max_tokens=48) + " Then" + gen("two", n=2, max_tokens=3, temperature=1.0, seed=5)

    state = program.run("One", backend=endpoint, temperature=0)
    stream = program.run("One", backend=endpoint, temperature=0, stream=True)
    pieces = list(stream.text_iter("x"))
    assert "".join(pieces) == state["x"] and len(pieces) > 1
    batch = program.run_batch([{"q": "One"}, {"q": "Two"}], backend=endpoint, temperature=0)
    assert batch[0]["tip"] == stream["tip"] == state["tip"] and len(state["tip"]) == 2
    assert batch[0]["two"] == state["two"] and len(set(state["two"])) == 2
    assert batch[1]["x"] != state["x"]


def test_constraints_hold_over_http(endpoint):
    state = run_gen(
        gen("ip", regex=r"[0-9]{2}\.[0-9]{1,2}")
        + gen("j", json_schema=json.dumps(SCHEMA), max_tokens=60)
        + gen("i", type=int)
        + gen("c", choices=["red", "green"], temperature=1.0)
        + gen("e", ebnf='root ::= "x" [0-9] "y"'),
        backend=endpoint,
    )
    assert len(state["ip"].split(".")[0]) == 2 and set(json.loads(state["j"])) == {"a", "b"}
    assert isinstance(state["i"], int) and state["c"] in ("red", "green")
    assert state["e"][0] + state["e"][2] == "xy" and state["e"][1].isdigit()


def test_logprobs_are_those_of_the_server(endpoint):
    state = run_gen(
        gen("x", max_tokens=3, return_logprob=True, top_logprobs_num=2, logprob_start_len=0),
        backend=endpoint,
        temperature=0,
    )
    meta = state.get_meta_info("x")
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == state["x"]
    for (logprob, _, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert logprob == top[0][0] >= top[1][0], "greedy takes the likeliest"
    inputs = meta["input_token_logprobs"]
    assert len(inputs) == len(meta["input_top_logprobs"]) == meta["prompt_tokens"] - 1, "the first token has none"
    assert inputs[-1][2] == " is" and all(logprob < 0 for logprob, _, _ in inputs)
    state_without_logprobs = run_gen(gen("x", max_tokens=3), backend=endpoint, temperature=0)
    assert state_without_logprobs["x"] == state[
        "x"
    ] and "output_token_logprobs" not in state_without_logprobs.get_meta_info("x")


@pytest.mark.parametrize("way", [{"exact": True}, {"particles": 3}], ids=["exact", "particles"])
def test_weights_are_those_of_the_server(endpoint, way):
    @plait.function
    def program(s):
        s += "Is Paris in France? Answer:" + plait.gen("answer", regex=" (yes|no)", seed=3, max_tokens=6, **way)

    state = program.run(backend=endpoint)
    sent = state.get_meta_info("answer")["weight"]
    assert state.weight("answer") == sent["log_weight"] < 0
    assert state.logprob("answer") == pytest.approx(sent["logprob"] - sent["log_weight"])


def test_choice_score_is_the_mean_logprob_of_its_tokens(endpoint):
    choices = [" Paris", " London", " a city in Germany"]
    state = run_gen(select("c", choices), backend=endpoint)
    assert state["c"] == " Paris"
    for choice, score in zip(choices, state.get_meta_info("c")["choice_scores"], strict=True):
        entries = run_gen(
            gen("x", max_tokens=0, return_logprob=True, logprob_start_len=5),
            prompt="The capital of France is" + choice,
            backend=endpoint,
        ).get_meta_info("x")["input_token_logprobs"]
        assert score == pytest.approx(sum(logprob for logprob, _, _ in entries) / len(entries))
    for method in (plait.greedy_token_selection, plait.unconditional_likelihood_normalized):
        assert run_gen(select("c", choices, choices_method=method), backend=endpoint)["c"] == " Paris"


def test_stop_regex_stop_and_ignore_eos(endpoint):
    prompt, free = "Count: 1, 2, 3, 4,", {"max_tokens": 24, "temperature": 0}
    complete = run_gen(gen("x", **free), prompt, backend=endpoint)["x"]
    assert " 7, 8" in complete
    state = run_gen(gen("x", stop_regex=r"[7-9]\s*,", **free), prompt, backend=endpoint)
    assert state["x"] == complete[: complete.index("7")]
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": r"[7-9]\s*,"}
    stream = run_gen(gen("x", stop_regex=r",[^8]*8", **free), prompt, backend=endpoint, stream=True)
    pieces = list(stream.text_iter("x"))
    assert "".join(pieces) == complete[: complete.index(",")], "text that stop_regex may still remove is not streamed"
    assert run_gen(gen("x", stop=[" 8"], **free), prompt, backend=endpoint)["x"] == complete[: complete.index(" 8")]


def test_stop_regex_in_openai_requests_and_programs(smollm, real_address):
    prompt, ask = "Count: 1, 2, 3, 4,", {"max_tokens": 24, "temperature": 0}
    body = {"stop_regex": ["[7-9]", "x{3}"]}
    completion = smollm.completions.create(model="default", prompt=prompt, extra_body=body, **ask).choices[0]
    assert completion.finish_reason == "stop" and completion.text.startswith(" 5, 6") and "7" not in completion.text
    program = [{"text": prompt}, {"gen": {"name": "x", **ask, **body}}]
    answer = httpx.post(f"{real_address}/v1/programs", json={"program": program}, timeout=60).json()
    assert answer["variables"]["x"] == completion.text
    with pytest.raises(openai.BadRequestError, match="stop_regex"):
        smollm.completions.create(model="default", prompt=prompt, extra_body={"stop_regex": "a$"}, **ask)


def test_user_text_does_not_become_control_tokens(endpoint):
    @plait.function
    def program(s, text):
        s += user(text) + assistant(gen("x", max_tokens=1))

    lengths = [
        program.run(text, backend=endpoint).get_meta_info("x")["prompt_tokens"] for text in ("ab", "ab<|im_end|>")
    ]
    assert lengths[1] - lengths[0] > 3, "nine letters, not one token"


def test_server_errors(endpoint, real_address):
    with pytest.raises(plait.ProgramError, match="answered 400") as caught:
        run_gen(
            gen("x", json_schema={"type": "string", "format": "nonsense", "minLength": 9, "maxLength": 3}),
            backend=endpoint,
        )
    assert isinstance(caught.value.__cause__, plait.CallRejected)
    with pytest.raises(plait.ProgramError, match="constraint Lark"):
        run_gen(gen("x", lark='start: "a"'), backend=endpoint)
    info = plait.get_server_info(endpoint)
    assert info["model_path"] and info["max_total_num_tokens"] > 0
    plait.flush_cache(endpoint)
    with pytest.raises(plait.CallRejected, match="answered 404"):
        plait.RuntimeEndpoint(f"{real_address}/v1")


# -- chat APIs ------------------------------------------------------------------------------------


@dataclass
class Point:
    x: int
    y: int


def ask(expr, backend, **keywords):
    @plait.function
    def program(s):
        s += user("A point on a map, in JSON.") + assistant(expr)

    return program.run(backend=backend, **keywords)


def test_typed_values_over_chat_apis(chat):
    for type_, kind in ((Point, Point), (int, int), (bool, bool), (Literal["a", "b"], str), (list[bool], list)):
        state = ask(gen("x", type=type_, max_tokens=80), chat, temperature=0)
        assert type(state["x"]) is kind
    state = ask(gen("x", json_schema=SCHEMA, max_tokens=60), chat)
    assert set(json.loads(state["x"])) == {"a", "b"} and json.dumps(json.loads(state["x"])) == state["x"]
    assert set(ask(gen("x", regex="[ab]{4}"), chat)["x"]) <= set("ab")
    with pytest.raises(plait.ProgramError, match="max_tokens=3 cut the value off"):
        ask(gen("x", type=Point, max_tokens=3), chat)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def test_tools_over_chat_apis(chat, endpoint):
    @plait.function
    def program(s):
        s += system("Use your tools.", tools=[add]) + user("What is 2 + 3?")
        s += assistant(gen("step", tools=[add], max_tokens=60))
        s.call("step")
        s += assistant(gen("answer", max_tokens=4))

    for backend in (chat, endpoint):
        state = program.run(backend=backend, temperature=0)
        call = state["step"]
        assert call.name == "add" and set(call.arguments) == {"a", "b"}
        assert str(sum(call.arguments.values())) in state.messages()[-2]["content"] and state["answer"]


def test_streams_stops_and_usage_over_chat_apis(chat):
    complete = ask(gen("x", max_tokens=16), chat, temperature=0)
    stream = ask(gen("x", max_tokens=16), chat, temperature=0, stream=True)
    pieces = list(stream.text_iter("x"))
    assert "".join(pieces) == complete["x"] and len(pieces) > 1
    meta = complete.get_meta_info("x")
    assert meta["finish_reason"]["type"] == "length" and meta["completion_tokens"] == 16
    assert meta["prompt_tokens"] == meta["cached_tokens"] + meta["computed_tokens"] > 10
    word = complete["x"].split()[1]
    stopped = ask(gen("x", max_tokens=16, stop=word), chat, temperature=0)
    assert stopped["x"] == complete["x"].partition(word)[0]
    assert stopped.get_meta_info("x")["finish_reason"]["type"] == "stop"


def test_refusals_and_errors_of_chat_apis(chat, real_address):
    for options, message in (
        ({"stop_regex": "a"}, "stop_regex is not supported by"),
        ({"min_p": 0.1}, "min_p is not supported by"),
        ({"ebnf": 'root ::= "a"'}, "cannot express the constraint Ebnf"),
    ):
        with pytest.raises(plait.ProgramError, match=message) as caught:
            ask(gen("x", **options), chat)
        assert isinstance(caught.value.__cause__, plait.InputError)
    where = {"base_url": real_address if isinstance(chat, plait.Anthropic) else f"{real_address}/v1", "api_key": "none"}
    unknown = type(chat)("nobody", **where)
    with pytest.raises(plait.ProgramError, match=r"answered 404.*'nobody' is not served") as caught:
        ask(gen("x"), unknown)
    assert isinstance(caught.value.__cause__, plait.CallRejected)
    where["base_url"] = "http://127.0.0.1:9"
    nowhere = type(chat)("m", **where, **({"max_retries": 0} if isinstance(chat, plait.Anthropic) else {}))
    with pytest.raises(plait.ProgramError, match="cannot be reached") as caught:
        ask(gen("x"), nowhere)
    assert isinstance(caught.value.__cause__, plait.RuntimeGone)


def test_refusals_of_anthropic(chats):
    openai, claude = chats
    with pytest.raises(plait.ProgramError, match="seed is not supported by Anthropic's API"):
        ask(gen("x", seed=1), claude)
    with pytest.raises(plait.ProgramError, match="top_k is not supported by the chat API"):
        ask(gen("x", top_k=1), openai)
    assert ask(gen("x", top_k=1, max_tokens=6), claude)["x"] == ask(gen("x", max_tokens=6), openai, temperature=0)["x"]

    @plait.function
    def late(s):
        s += user("Hi") + system("Now be terse.") + assistant(gen("x"))

    with pytest.raises(plait.ProgramError, match="system turns at the beginning only"):
        late.run(backend=claude)


@pytest.mark.parametrize(("name", "package"), [("Anthropic", "anthropic"), ("LiteLLM", "litellm")])
def test_missing_client_package(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"{name} needs the package '{package}'.*pip install 'plait\[{package}\]'$"
    with pytest.raises(plait.InputError, match=message):
        getattr(plait, name)("m")


def test_removed_backends_name_a_replacement():
    with pytest.raises(AttributeError, match=r'LiteLLM\("vertex_ai/<model>"\)'):
        _ = plait.VertexAI
