"""Ollama's endpoints with its own client: answers, streams and errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from importlib.metadata import version

import httpx
import msgspec
import ollama
import pytest
from scripted_scheduler import ScriptedScheduler, byte_tokenizer
from served_process import Served

from plait.runtime.chat.parser import OutputParser, ParsedPart
from plait.runtime.client.client import Client
from plait.runtime.model_files.model_description import describe
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.chat.engine import PreparedChat
from plait.runtime.server.generation.submission import RequestHandle, Submission
from plait.runtime.server.protocols.ollama.generate import CheckedRequest, OllamaResponseWriter

ASK = [{"role": "user", "content": "Name three colours."}]
SHORT = {"num_predict": 5, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
COUNTS = ("prompt_eval_count", "eval_count")
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="session")
def client(address):
    return ollama.Client(host=address, timeout=60)


@pytest.fixture(scope="session")
def real_client(real_address):
    return ollama.Client(host=real_address, timeout=60)


@pytest.fixture(scope="session")
def name(client):
    return client.list().models[0].model


def chat_and_stream(client, **fields):
    """The response of a chat, after a check that its stream equals it."""
    fields = {"model": "default", "options": SHORT} | fields
    response = client.chat(**fields)
    assert isinstance(response, ollama.ChatResponse) and response.done and response.message.role == "assistant"
    lines = list(client.chat(**fields, stream=True))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line.message.content or "" for line in lines) == response.message.content
    calls = [call.model_dump() for line in lines for call in line.message.tool_calls or ()]
    assert calls == [call.model_dump() for call in response.message.tool_calls or ()]
    assert lines[-1].done_reason == response.done_reason
    assert [lines[-1][count] for count in COUNTS] == [response[count] for count in COUNTS]
    logprobs = [entry.model_dump() for line in lines for entry in line.logprobs or ()]
    assert logprobs == [entry.model_dump() for entry in response.logprobs or ()]
    return response


def test_stream_equals_the_answer(client, name):
    response = chat_and_stream(
        client, model=name, messages=ASK, logprobs=True, top_logprobs=2, keep_alive="5m", think=False
    )
    assert response.model == name and response.message.content and response.done_reason == "length"
    assert response.eval_count == 5 and all(response[name] >= 0 for name in DURATIONS)
    assert len(response.logprobs) == 5 and all(len(entry.top_logprobs) == 2 for entry in response.logprobs)
    assert "".join(entry.token for entry in response.logprobs) == response.message.content


def test_generate_equals_a_chat_of_one_turn(client):
    chat = chat_and_stream(client, messages=[{"role": "system", "content": "Be brief."}, *ASK])
    fields = dict(model="default", prompt=ASK[0]["content"], system="Be brief.", options=SHORT)
    response = client.generate(**fields)
    assert isinstance(response, ollama.GenerateResponse) and response.response == chat.message.content
    assert response.prompt_eval_count == chat.prompt_eval_count
    lines = list(client.generate(**fields, stream=True))
    assert "".join(line.response for line in lines) == response.response and lines[-1].eval_count == 5


def test_raw_prompt(real_client):
    answer = real_client.generate(model="default", prompt="The capital of France is", raw=True, options=SHORT)
    assert "Paris" in answer.response and answer.prompt_eval_count == 5
    marked = real_client.generate(model="default", prompt="<|im_start|>", raw=True, options={"num_predict": 1})
    assert marked.prompt_eval_count == 1


def test_formats(client):
    enough = SHORT | {"num_predict": 12}
    response = chat_and_stream(
        client, messages=ASK, format=SCHEMA | {"properties": {"n": {"enum": [1, 22]}}}, options=enough
    )
    assert json.loads(response.message.content)["n"] in (1, 22) and response.done_reason == "stop"
    answer = client.generate(model="default", prompt="{}", format={"enum": ["a", "b"]}, options=enough)
    assert json.loads(answer.response) in ("a", "b")
    assert client.chat("default", ASK, format="json", options=SHORT).message.content.startswith("{")


def test_tools(client):
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}]},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    assert chat_and_stream(client, messages=turns, tools=[WEATHER]).eval_count > 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_tool_choice(address, choice):
    """Fields that the ai SDK's provider sends at the top level. What `options` says comes first."""
    body = {"model": "default", "messages": ASK, "tools": [WEATHER], "tool_choice": choice, "stream": False}
    answer = httpx.post(f"{address}/api/chat", json=body | {"temperature": 0, "max_output_tokens": 60}).json()
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "get_weather" and "warnings" not in answer
    short = httpx.post(f"{address}/api/chat", json=body | {"max_output_tokens": 60, "options": {"num_predict": 2}})
    assert short.json()["eval_count"] == 2
    wrong = httpx.post(f"{address}/api/chat", json={"model": "default", "messages": ASK, "tool_choice": choice})
    assert wrong.status_code == 400 and "needs 'tools'" in wrong.text


def test_format_with_tools(client):
    response = chat_and_stream(
        client, messages=ASK, tools=[WEATHER], format={"enum": ["a", "b"]}, options=SHORT | {"num_predict": 40}
    )
    assert response.message.tool_calls or json.loads(response.message.content) in ("a", "b")


def test_options(client):
    text = chat_and_stream(client, messages=ASK).message.content
    stopped = chat_and_stream(
        client, messages=ASK, options=SHORT | {"stop": [text[6:9]], "num_ctx": 512, "repeat_penalty": 1.0}
    )
    assert stopped.done_reason == "stop" and stopped.message.content == text[: text.index(text[6:9])]
    seeded = [client.chat("default", ASK, options={"num_predict": 6, "seed": 4}).message.content for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_model_endpoints(real_client, real_address):
    (listed,) = real_client.list().models
    name = listed.model
    assert name.endswith(":latest") and listed.size > 10**7 and len(listed.digest) == 64
    assert listed.details.format == "gguf" and listed.details.family == "llama"
    assert listed.details.parameter_size == "134.52M"
    (loaded,) = real_client.ps().models
    assert loaded.name == name and loaded.context_length > 0 and loaded.digest == listed.digest
    shown = real_client.show(name)
    assert shown.details == listed.details and "tools" in shown.capabilities and "thinking" not in shown.capabilities
    assert shown.modelinfo["general.architecture"] == "llama" and "<|im_start|>" in shown.template
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    long = httpx.post(f"{real_address}/api/show", json={"name": name, "verbose": True}, timeout=60).json()
    assert len(long["model_info"]["tokenizer.ggml.tokens"]) == 49152
    assert httpx.get(f"{real_address}/api/version", timeout=60).json() == {"version": version("plait")}


def test_request_without_prompt_reports_the_loaded_model(client):
    assert client.chat("default", []).done_reason == "load"
    assert client.generate("default", "").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="nothing") as refused:
        client.chat("nothing", ASK)
    assert refused.value.status_code == 404


def test_asynchronous_client(address):
    async def ask():
        client = ollama.AsyncClient(host=address)
        return [line.message.content async for line in await client.chat("default", ASK, stream=True, options=SHORT)]

    assert "".join(asyncio.run(ask()))


def test_lines_are_json(address):
    answer = httpx.post(f"{address}/api/chat", json={"model": "default", "messages": ASK, "options": SHORT}, timeout=60)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["done"] is True and len(lines) > 1


WRONG = [
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]}, "tool_calls"),
    ({"format": "xml"}, "format"),
    ({"format": {"type": "no"}}, "format"),
    ({"tools": [WEATHER, WEATHER]}, "get_weather"),
    ({"think": "hard"}, "think"),
    ({"keep_alive": 0}, "keep_alive"),
    ({"keep_alive": "soon"}, "keep_alive"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"options": {"num_ctx": 1 << 20}}, "num_ctx"),
    ({"options": {"num_predict": -3}}, "num_predict"),
    ({"options": {"temperature": -1}}, "temperature"),
    ({"options": {"top_p": 2}}, "top_p"),
    ({"options": {"repeat_penalty": 0}}, "repeat_penalty"),
    ({"options": {"repeat_penalty": 1.1, "repeat_last_n": -2}}, "repeat_last_n"),
    ({"options": {"mirostat": 1}}, "mirostat"),
    ({"options": {"typical_p": 0}}, "typical_p"),
    ({"options": {"tfs_z": 0.5}}, "tfs_z"),
    ({"options": {"temprature": 1}}, "temprature"),
    ({"options": {"stop": [""]}}, "stop"),
]
WRONG_GENERATE = [
    ({"images": ["aGk="]}, "images"),
    ({"suffix": "x"}, "suffix"),
    ({"template": "x"}, "template"),
    ({"context": [1]}, "context"),
    ({"raw": True, "system": "x"}, "system"),
    ({"width": 5}, "width"),
]


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [("chat", *case) for case in WRONG] + [("generate", *case) for case in WRONG_GENERATE],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_the_field(http, path, change, named):
    body = {"model": "default", "options": SHORT} | ({"messages": ASK} if path == "chat" else {"prompt": "x"}) | change
    for extra in ({}, {"stream": False}):
        answer = http.post(f"/api/{path}", json=body | extra)
        assert answer.status_code == 400, answer.text
        assert set(answer.json()) == {"error"} and named in answer.json()["error"]


def test_errors_of_the_path_have_ollamas_format(address):
    answer = httpx.post(f"{address}/api/pull", json={}, timeout=60)
    assert answer.status_code == 404 and isinstance(answer.json()["error"], str)


def test_show_and_ps_have_the_context_that_requests_may_use(small_model):
    server = Served(small_model, "--context-length", "640")
    with contextlib.closing(server), httpx.Client(base_url=server.address, timeout=60) as http:
        info = http.post("/api/show", json={"model": "default"}).json()["model_info"]
        (loaded,) = http.get("/api/ps").json()["models"]
        limit = info["llama.context_length"]
        assert limit == loaded["context_length"] == http.get("/v1/models").json()["data"][0]["max_model_len"] == 640
        assert next(value for key, value in info.items() if "context_length" in key) == limit
        body = {"model": "default", "messages": ASK, "stream": False}
        for num_ctx, status in ((limit, 200), (limit + 1, 400)):
            options = {"num_ctx": num_ctx, "num_predict": 1}
            assert http.post("/api/chat", json=body | {"options": options}).status_code == status


def test_the_window_of_the_repetition_penalty(real_client):
    """Ollama's own default is 64; here all tokens count unless a request says otherwise."""
    prompt = "red red red red red red blue blue blue blue"
    base = {"temperature": 0, "num_predict": 12, "repeat_penalty": 1.9}

    def text(**options):
        return real_client.generate("default", prompt, raw=True, options=base | options).response

    assert text() == text(repeat_last_n=-1) != text(repeat_last_n=2)
    assert text(repeat_last_n=0) == text(repeat_penalty=1.0) != text()
    assert text(repeat_last_n=64) == text(), "all of this text is in a window of 64"


# -- without a server -------------------------------------------------------------------------------


def test_tool_call_is_streamed_when_it_is_complete():
    prepared = PreparedChat([], None, None, lambda: OutputParser(None, False))
    checked = CheckedRequest("chat", "m", Submission([], SamplingParams()), prepared)
    writer = OllamaResponseWriter(Client(ScriptedScheduler(), byte_tokenizer()), checked, RequestHandle([None]), "")
    messages = []
    reasoning, first = ParsedPart("reasoning", "hm"), [ParsedPart("call", "f", 0), ParsedPart("arguments", '{"a"', 0)]
    cut_off = [ParsedPart("call", "g", 1), ParsedPart("arguments", '{"b', 1)]
    for part in [reasoning, *first, ParsedPart("arguments", ":1}", 0), ParsedPart("text", "ok"), *cut_off]:
        writer.add_parts([part], is_last=False)
        line = writer.next_line()
        messages.append(line and json.loads(msgspec.json.encode(line.message)))
    writer.add_parts([], is_last=True)
    assert writer.next_line() is None  # g was cut off
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    assert [message for message in messages if message] == [
        {"role": "assistant", "content": "", "thinking": "hm"},
        {"role": "assistant", "content": "ok", "tool_calls": [call]},
    ]


def test_description_of_a_folder(tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file(
        {"a": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(5, dtype=torch.bfloat16)},
        tmp_path / "x.safetensors",
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos": [1]}')
    description = describe(str(tmp_path))
    assert (description.format, description.family, description.num_parameters, description.quantization) == (
        "safetensors",
        "llama",
        17,
        "BF16",
    )
    assert description.metadata["eos"] == [1] and description.short_metadata["eos"] is None and description.size > 34
