"""`/v1/programs`: results equal those of the other endpoints, streamed or not, and errors name the node."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from json_bodies import parse

from plait.runtime.server.errors import ApiError
from plait.runtime.server.protocols.programs.program_compiler import MAX_DEPTH, compile_program
from plait.runtime.server.protocols.programs.types import ProgramRequest

GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="session")
def real_http(real_address):
    with httpx.Client(base_url=real_address, timeout=60) as client:
        yield client


def run_and_stream(http, program, **fields):
    """The result of a program, after a check that its stream gives the same."""
    body = {"program": program, "defaults": GREEDY} | fields
    answer = http.post("/v1/programs", json=body)
    assert answer.status_code == 200, answer.text
    result = answer.json()
    pieces, ended = {}, {}
    events = list(stream(http, body))
    assert events[0][0] == "program.created" and events[-1][0] == "program.completed"
    for name, data in events[1:-1]:
        assert name == data["type"]
        key = (data["path"], data["sample"])
        assert key not in ended
        if name == "variable.delta":
            pieces.setdefault(key, []).append(data["delta"])
        else:
            ended[key] = data["value"]
    assert {key: "".join(texts) for key, texts in pieces.items()}.items() <= ended.items()
    assert ended == {(call["path"], call["sample"]): call["value"] for call in result["calls"]}
    assert comparable(events[-1][1]["program"]) == comparable(result)
    usage = result["usage"]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert usage[name] == sum(call["usage"][name] for call in result["calls"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return result


def stream(http, body):
    with http.stream("POST", "/v1/programs", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for event in "".join(answer.iter_text()).strip().split("\n\n"):
            name, _, data = event.partition("\n")
            yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def comparable(program):
    calls = [{key: value for key, value in call.items() if key not in ("usage", "scores")} for call in program["calls"]]
    return {"text": program["text"], "variables": program["variables"], "messages": program["messages"], "calls": calls}


def completion_text(http, text):
    body = {"model": "default", "prompt": text, **GREEDY}
    return http.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_gen_equals_a_completion(http):
    program = [
        {"text": "The capital of France is"},
        {"gen": {"name": "a"}},
        {"text": " And so"},
        {"gen": {"name": "b"}},
    ]
    result = run_and_stream(http, program)
    first = completion_text(http, "The capital of France is")
    assert result["variables"]["a"] == first
    assert result["text"].startswith(f"The capital of France is{first} And so")
    assert result["text"].endswith(result["variables"]["b"])
    assert [call["path"] for call in result["calls"]] == ["program[1].gen", "program[3].gen"]
    assert result["calls"][1]["usage"]["cached_tokens"] >= result["calls"][0]["usage"]["prompt_tokens"]


def test_roles_equal_a_chat_completion(http):
    turns = [("system", "Be brief."), ("user", "Name a colour.")]
    program = [{"role": role, "content": [{"text": text}]} for role, text in turns]
    program.append({"role": "assistant", "content": [{"gen": {"name": "colour"}}]})
    result = run_and_stream(http, program)
    messages = [{"role": role, "content": text} for role, text in turns]
    chat = {"model": "default", "messages": messages, **GREEDY}
    answer = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert result["variables"]["colour"] == answer
    assert result["messages"] == [*messages, {"role": "assistant", "content": answer}]


def test_select_and_constraints(real_http):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    program = [
        {"text": "The capital of France is"},
        {"select": {"name": "city", "choices": [" banana", " Paris"]}},
        {"gen": {"name": "year", "regex": " [0-9]{4}", "max_tokens": 6}},
        {"gen": {"name": "value", "json_schema": schema, "complete": True, "max_tokens": 8}},
        {"gen": {"name": "spec", "constraint": {"type": "choices", "choices": ["x", "y"]}}},
        {"gen": {"name": "one", "choices": [" left", " right"], "temperature": 1.0, "seed": 1}},
        {"gen": {"name": "ebnf", "ebnf": 'root ::= "ab" | "cd"', "complete": True, "return_logprob": True}},
    ]
    result = run_and_stream(real_http, program)
    variables, calls = result["variables"], result["calls"]
    assert variables["city"] == " Paris"
    assert len(calls[0]["scores"]) == 2 and calls[0]["scores"][1] > calls[0]["scores"][0]
    assert re.fullmatch(" [0-9]{4}", variables["year"]) and isinstance(json.loads(variables["value"])["n"], int)
    assert variables["spec"] in "xy" and variables["one"] in (" left", " right") and variables["ebnf"] in ("ab", "cd")
    assert "".join(entry["token"] for entry in calls[5]["logprobs"]).startswith(variables["ebnf"])
    assert result["text"] == "The capital of France is" + "".join(variables.values())


def test_forks_gather(http):
    branches = [
        [{"text": f" {word}"}, {"gen": {"name": "tip"}}, {"gen": {"name": f"own{i}"}}] for i, word in enumerate("AB")
    ]
    program = [{"text": "Tips:"}, {"fork": {"branches": branches}}, {"text": " So"}, {"gen": {"name": "end"}}]
    result = run_and_stream(http, program)
    assert result["variables"]["tip"] == [completion_text(http, f"Tips: {word}") for word in "AB"]
    assert [len(result["variables"][f"own{i}"]) for i in range(2)] == [1, 1]
    assert result["text"] == "Tips: So" + result["variables"]["end"] and result["variables"]["end"] == completion_text(
        http, "Tips: So"
    )
    assert [call["path"] for call in result["calls"]][:2] == [f"program[1].fork.branches[0][{i}].gen" for i in (1, 2)]


def test_forks_append_and_variables_are_plain_text(http):
    branches = [[{"text": " A"}, {"gen": {"name": "tip"}}], [{"text": " B"}]]
    program = [
        {"role": "user", "content": [{"var": "control_text"}, {"fork": {"branches": branches, "join": "append"}}]},
        {"role": "assistant", "content": [{"gen": {"name": "x"}}, {"var": "x"}, {"var": "many", "index": 1}]},
    ]
    result = run_and_stream(http, program, variables={"control_text": "<|im_end|>", "many": ["one", "two"]})
    tip = next(call["value"] for call in result["calls"] if call["name"] == "tip")
    x = result["variables"]["x"]
    assert "tip" not in result["variables"]
    assert result["messages"][0]["content"] == f"<|im_end|> A{tip} B"
    assert result["messages"][1]["content"] == f"{x}{x}two"
    control = http.post("/tokenize", json={"prompt": "<|im_end|>", "parse_special": True}).json()["count"]
    plain = http.post("/tokenize", json={"prompt": "<|im_end|>", "parse_special": False}).json()["count"]
    assert control == 1 < plain
    first = next(call for call in result["calls"] if call["name"] == "tip")
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "<|im_end|> A"}]}).json()["tokens"]
    closing = http.post("/tokenize", json={"prompt": "<|im_end|>\n<|im_start|>assistant\n", "parse_special": True})
    assert first["usage"]["prompt_tokens"] == len(chat) - closing.json()["count"]


def test_samples(http):
    gen = {"name": "s", "n": 3, "temperature": 1.0, "seed": 7}
    result = run_and_stream(http, [{"text": "Once"}, {"gen": gen}, {"text": "!"}, {"var": "s", "index": 2}])
    texts = result["variables"]["s"]
    assert len(texts) == 3 and len(set(texts)) > 1
    assert result["text"] == f"Once{texts[0]}!{texts[2]}"
    assert [call["sample"] for call in result["calls"]] == [0, 1, 2]


def test_violation_of_a_lenient_constraint(http):
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 2,
    }
    lenient = {"type": "json_schema", "schema": json.dumps(schema), "lenient": True}
    program = [{"text": "Two numbers: "}, {"gen": {"name": "v", "constraint": lenient, "max_tokens": 40}}]
    body = {"program": program, "defaults": GREEDY}
    for _ in range(10):  # a busy machine may not check a value in time
        results = [http.post("/v1/programs", json=body).json(), list(stream(http, body))[-1][1]["program"]]
        if "could not be checked" not in json.dumps(results):
            break
    for result in results:
        (call,) = result["calls"]
        assert (call["violation"] is None) == (len(set(json.loads(call["value"]))) == 2)
        assert "non-unique" in (call["violation"] or "non-unique")


def test_runtime_errors_name_the_node(http):
    late = [{"text": "a"}, {"gen": {"name": "a"}}, {"fork": {"branches": [[{"gen": {"max_tokens": 4000, "timeout": 0.5,
            "ignore_eos": True}}]]}}]  # fmt: skip
    answer = http.post("/v1/programs", json={"program": late, "defaults": GREEDY})
    assert answer.status_code == 504
    assert answer.json()["error"]["param"] == "program[2].fork.branches[0][0].gen.timeout"
    events = list(stream(http, {"program": late, "defaults": GREEDY}))
    assert events[-1][0] == "error" and events[-1][1]["error"]["param"].startswith("program[2].fork")
    empty = http.post("/v1/programs", json={"program": [{"gen": {}}]})
    assert empty.status_code == 400 and empty.json()["error"]["param"] == "program[0].gen"
    token = http.post("/v1/programs", json={"program": [{"text": "a"}, {"gen": {"stop_token_ids": [1 << 30]}}]})
    assert token.status_code == 400 and token.json()["error"]["param"] == "program[1].gen.stop_token_ids"


def test_example_of_the_documentation(http):
    page = (Path(__file__).parents[4] / "docs" / "programs-api.md").read_text()
    body = json.loads(page.split("-d '", 1)[1].split("'\n```", 1)[0])
    body["defaults"]["max_tokens"] = 3
    result = run_and_stream(http, body["program"], variables=body["variables"], defaults=body["defaults"])
    assert result["variables"]["kind"] in ("food", "sport") and len(result["variables"]["tip"]) == 2
    assert [turn["role"] for turn in result["messages"]] == ["user", "assistant", "user"]


# -- without a server -------------------------------------------------------------------------------

GEN = {"gen": {"name": "g"}}


def nested(depth):
    return [{"fork": {"branches": [nested(depth - 1)]}}] if depth else [GEN]


WRONG = [
    ({"program": []}, "program"),
    ({"program": [{}]}, "program[0]"),
    ({"program": [{"text": "a"}]}, "program"),
    ({"program": [{"text": "a", "var": "b"}]}, "program[0]"),
    ({"program": [{"txt": "a"}]}, "program[0].txt"),
    ({"program": [{"text": 5}]}, "program[0].text"),
    ({"program": [{"text": "a", "index": 1}]}, "program[0].index"),
    ({"program": [{"text": "a", "content": []}]}, "program[0].content"),
    ({"program": [{"role": "user"}]}, "program[0].content"),
    ({"program": [{"role": "robot", "content": []}]}, "program[0].role"),
    ({"program": [{"role": "user", "content": [{"role": "user", "content": []}]}]}, "program[0].content[0].role"),
    ({"program": [{"var": "x"}, GEN]}, "program[0].var"),
    ({"program": [GEN, {"var": "g", "index": 0}]}, "program[1].index"),
    ({"program": [{"gen": {"name": "g", "n": 2}}, {"var": "g"}]}, "program[1].var"),
    ({"program": [{"gen": {"name": "g", "n": 2}}, {"var": "g", "index": 2}]}, "program[1].index"),
    ({"program": [{"fork": {"branches": [[GEN], [{"var": "g"}]]}}]}, "program[0].fork.branches[1][0].var"),
    ({"program": [{"fork": {"branches": [[GEN]], "join": "append"}}, {"var": "g", "index": 0}]}, "program[1].var"),
    ({"program": [{"fork": {"branches": []}}]}, "program[0].fork.branches"),
    ({"program": [{"fork": {"branches": [[GEN]], "join": "no"}}]}, "program[0].fork.join"),
    ({"program": [{"fork": {"branches": [[GEN]] * 200}}]}, "program[0].fork.branches"),
    ({"program": [{"gen": {"n": 100}}, {"gen": {"n": 100}}]}, "program[1].gen.n"),
    ({"program": nested(MAX_DEPTH + 1)}, None),
    (
        {"program": [{"text": ""}] * 4000 + [{"fork": {"branches": [[{"text": ""}] * 200]}}]},
        "program[4000].fork.branches[0]",
    ),
    ({"program": [{"gen": {"name": ""}}]}, "program[0].gen.name"),
    ({"program": [{"gen": {"temperature": -1}}]}, "program[0].gen.temperature"),
    ({"program": [{"gen": {"timeout": 0}}]}, "program[0].gen.timeout"),
    ({"program": [{"gen": {"top_logprobs_num": 3}}]}, "program[0].gen.top_logprobs_num"),
    ({"program": [{"gen": {"stop": [""]}}]}, "program[0].gen.stop"),
    ({"program": [{"gen": {"choices": ["a", "a"]}}]}, "program[0].gen.choices"),
    ({"program": [{"gen": {"regex": "a", "choices": ["a"]}}]}, "program[0].gen.choices"),
    ({"program": [{"gen": {"constraint": {"type": "regex", "pattern": 5}}}]}, "program[0].gen.constraint.pattern"),
    ({"program": [{"gen": {"constraint": {"type": "choices", "choices": []}}}]}, "program[0].gen.constraint"),
    ({"program": [{"gen": {"complete": True}}]}, "program[0].gen.complete"),
    ({"program": [{"select": {"choices": []}}]}, "program[0].select.choices"),
    ({"program": [{"select": {"choices": ["a", ""]}}]}, "program[0].select.choices[1]"),
    ({"program": [{"select": {"choices": ["a"], "choices_method": "best"}}]}, "program[0].select.choices_method"),
    ({"program": [GEN], "defaults": {"top_p": 7}}, "defaults.top_p"),
    ({"program": [GEN], "variables": {"a": 5}}, None),
    ({"program": [GEN], "more": 1}, "more"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=[str(body)[:60] for body, _ in WRONG])
def test_errors_name_the_node(body, param):
    with pytest.raises(ApiError) as refused:
        compile_program(parse(json.dumps(body).encode(), ProgramRequest), 128)
    assert refused.value.status == 400
    if param is not None:
        assert refused.value.param == param


@pytest.mark.parametrize(("form", "text"), [("regex", "("), ("json_schema", "{"), ("lark", "start: no")])
def test_constraint_that_does_not_compile(http, form, text):
    for more in ({}, {"stream": True}):
        answer = http.post("/v1/programs", json={"program": [{"text": "a"}, {"gen": {form: text}}]} | more)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == f"program[1].gen.{form}"


def test_text_longer_than_the_context_is_not_tokenized(http):
    answer = http.post("/v1/programs", json={"program": [{"text": "a" * 1_000_000}] * 3 + [{"gen": {}}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "program[3].gen" and "3000000 characters" in error["message"]


@pytest.mark.parametrize("depth", [1, MAX_DEPTH - 1])
def test_limits_are_inclusive(depth):
    body = {"program": nested(depth), "defaults": {"min_tokens": 3}}
    body["program"].append({"var": "g", "index": [0] * depth})
    program = compile_program(parse(json.dumps(body).encode(), ProgramRequest), 128)
    assert len(program.steps) == 2
