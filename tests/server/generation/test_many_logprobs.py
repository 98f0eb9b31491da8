"""Many logprobs: decoded and written in small parts, in a thread, and once. Counted, not timed."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from example_share import sample_of

from plait.runtime.call_reports import TokenLogprob, Usage, decode_logprobs, encode_logprobs
from plait.runtime.client import call as call_module
from plait.runtime.client import stream as stream_module
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.stream import CallUpdate
from plait.runtime.messages import Finished
from plait.runtime.server.generation.submission import RequestHandle
from plait.runtime.server.generation.threads import run_in_thread_if
from plait.runtime.server.protocols import answer as answer_module
from plait.runtime.server.protocols.openai import completions
from plait.runtime.server.protocols.programs import endpoint as programs
from plait.runtime.server.protocols.sglang import generate as sglang
from plait.runtime.server.protocols.sglang.generate import SglangResponseWriter
from plait.runtime.server.protocols.sglang.request import parse_generate_request
from plait.runtime.server.protocols.sglang.types import GenerateRequest
from plait.runtime.server.settings import server_settings
from plait.runtime.tokenizer.detokenizer import Detokenizer

USAGE = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
LOGPROBS = [TokenLogprob(i % 7, -0.5 * i, [(1, -1.0), (2, -2.5)]) for i in range(1000)]


def test_logprobs_are_decoded_in_parts_at_the_first_access(monkeypatch):
    parts = encode_logprobs(LOGPROBS)
    assert len(parts) == 8 and decode_logprobs(parts) == LOGPROBS and encode_logprobs([]) == []
    message = Finished(1, "stop", USAGE, prompt_logprobs=parts)
    decoded = []
    monkeypatch.setattr(call_module, "decode_logprobs", lambda given: decoded.append(1) or decode_logprobs(given))
    call = Call(1, Detokenizer(SimpleNamespace(token_bytes=[])), lambda: None)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Finished)
    call.on_finished(received)
    result = call.result(0)
    assert not decoded
    assert result.prompt_logprobs == LOGPROBS and result.prompt_logprobs is result.prompt_logprobs
    assert decoded == [1]


@pytest.mark.parametrize("given", [None, [], LOGPROBS])
def test_a_result_is_made_of_decoded_logprobs_too(given):
    """As results that a program saved."""
    assert CallResult("", "stop", USAGE, prompt_logprobs=given).prompt_logprobs == given
    assert CallResult("", "stop", USAGE).prompt_logprobs is None


def test_waiting_for_results_decodes_no_logprobs(monkeypatch):
    monkeypatch.setattr(stream_module, "decode_logprobs", lambda parts: pytest.fail("they were decoded"))
    call = Call(1, Detokenizer(SimpleNamespace(token_bytes=[b"a"] * 9)), lambda: None)
    call.on_tokens([1], LOGPROBS[:1])
    call.on_finished(Finished(1, "stop", USAGE))
    (result,) = asyncio.run(RequestHandle(calls=[call]).results())
    assert result.logprobs == LOGPROBS[:1]


BODIES = {  # each has at least 39 tokens in all, in answers of at most 13 where there can be several
    "/v1/chat/completions": {
        **{"model": "default", "messages": [{"role": "user", "content": "a"}], "max_tokens": 13, "n": 3},
        **{"ignore_eos": True, "logprobs": True, "top_logprobs": 2},
    },
    "/v1/completions": {
        **{"model": "default", "prompt": ["a", "b", "c"], "max_tokens": 13, "ignore_eos": True, "logprobs": 2},
    },
    "/generate": {
        **{"text": "a", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}},  # its answers end one by one
        **{"return_logprob": True, "top_logprobs_num": 2},
    },
    "/v1/programs": {
        "program": [{"text": "a"}, {"gen": {"max_tokens": 13, "n": 3, "ignore_eos": True, "return_logprob": True}}]
    },
    "/v1/responses": {
        **{"model": "default", "input": "a", "max_output_tokens": 40, "top_logprobs": 2},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string", "minLength": 2000}}},
    },
    "/api/generate": {
        **{"model": "default", "prompt": "a", "raw": True, "stream": False, "logprobs": True, "top_logprobs": 2},
        **{"options": {"num_predict": 40, "seed": 1}, "format": {"type": "string", "minLength": 2000}},
    },
}


@pytest.mark.parametrize("path", sample_of(list(BODIES), least=3))
def test_many_logprobs_are_written_in_a_thread_however_many_answers_have_them(serve, monkeypatch, path):
    """A thread of `run_in_thread_if` is found by what it is asked to do there."""
    done_in_thread = []

    async def recorded(is_large, work, *args):
        if is_large:
            done_in_thread.append(work)
        return await run_in_thread_if(is_large, work, *args)

    for module in (answer_module, completions, programs, sglang):
        monkeypatch.setattr(module, "run_in_thread_if", recorded)
        monkeypatch.setattr(module, "LARGE_TOKENS", 32)
    address, _ = serve()
    answer = httpx.post(address + path, json=BODIES[path], timeout=60)
    assert answer.status_code == 200, answer.text
    assert done_in_thread


@pytest.mark.parametrize("top", [0, 2])
def test_the_logprobs_of_echoes_are_chunks_of_their_own_and_made_aside(serve, monkeypatch, top):
    threads = []
    echo_chunk = completions._CompletionWriter._echo_chunk

    def recorded(*args):
        threads.append(threading.get_ident())
        return echo_chunk(*args)

    monkeypatch.setattr(completions._CompletionWriter, "_echo_chunk", recorded)
    monkeypatch.setattr(completions, "LARGE_TOKENS", 3)
    address, _ = serve()
    body = {"model": "default", "prompt": ["abc def ghi", "xyz xyz"], "max_tokens": 4, "temperature": 0}
    body |= {"ignore_eos": True, "echo": True, "logprobs": top, "n": 2}
    whole = httpx.post(address + "/v1/completions", json=body, timeout=60).json()["choices"]
    with httpx.stream("POST", address + "/v1/completions", json=body | {"stream": True}, timeout=60) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert len(threads) == 4 and len(set(threads)) <= 4 and threading.get_ident() not in threads
    for index, choice in enumerate(whole):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["text"] == body["prompt"][index // 2]
        assert "".join(part["text"] for part in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            parts = [part["logprobs"][name] for part in own if part["logprobs"]]
            streamed = None if parts[0] is None else [value for part in parts for value in part]
            if name != "token_logprobs" and name != "top_logprobs":
                assert streamed == values
            else:
                assert (streamed is None) == (values is None) and len(streamed or ()) == len(values or ())


def test_each_token_of_a_stream_of_sglang_is_written_once(monkeypatch):
    """Each chunk has all logprobs so far."""
    written = []
    monkeypatch.setattr(SglangResponseWriter, "_top_of", lambda self, entry: written.append(entry) or [])
    client = SimpleNamespace(tokenizer=SimpleNamespace(vocabulary=SimpleNamespace(token_bytes=[b"a"] * 9)))
    request = SimpleNamespace(
        with_logprobs=True, with_text=False, top_logprobs=2, skip_special_tokens=True, rid="r", input_start=None
    )
    request.submission = SimpleNamespace(prompt_ids=[1])
    writer = SglangResponseWriter(client, request, None, None, None)
    for number in range(5):
        writer.push(CallUpdate("a", [1], [msgspec.msgpack.encode(LOGPROBS[number : number + 1])], False))
        meta_info = msgspec.json.decode(msgspec.json.encode(writer.response()))["meta_info"]
        assert [entry[0] for entry in meta_info["output_token_logprobs"]] == [-0.5 * i for i in range(number + 1)]
    assert written == LOGPROBS[:5]


def test_the_loop_serves_others_between_the_prompts_of_a_request():
    client = SimpleNamespace(model=SimpleNamespace(vocab_size=9, context_length=99))
    body = GenerateRequest(input_ids=[[1]] * 5)
    num_passes = 0

    async def run():
        async def others():
            nonlocal num_passes
            while True:
                await asyncio.sleep(0)
                num_passes += 1

        task = asyncio.create_task(others())
        await asyncio.sleep(0)
        await parse_generate_request(body, client, "", "", server_settings())
        task.cancel()

    asyncio.run(run())
    assert num_passes == 4
