"""`--store-responses`: responses are continued, read and deleted by the key that made them, for a time."""

from __future__ import annotations

import contextlib

import httpx
import openai
import pytest
from scripted_server import ScriptedServer

from plait.runtime.errors import InputError
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.serve import serve as run_server
from plait.runtime.server.settings import server_settings

ASK = "Tell me the capital of France in one short sentence."
KEYS = {"ann": digest(b"ann-key"), "bob": digest(b"bob-key")}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def openai_client(address, api_key="none"):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=api_key, max_retries=0, timeout=60)


@pytest.fixture
def stored(serve):
    """OpenAI's client of a server with the embedded model that stores responses."""
    address, _ = serve(store_responses_s=600.0)
    return openai_client(address)


def create(client, **request):
    return client.responses.create(**{"model": "default", "temperature": 0, "max_output_tokens": 24, **request})


def test_a_conversation_goes_on_and_its_prefix_is_cached(stored) -> None:
    first = create(stored, input=ASK, instructions="Be brief.")
    assert first.store and first.output_text == "The capital of France is Paris."
    second = create(stored, input="And of Italy?", instructions="Be brief.", previous_response_id=first.id)
    whole = [{"role": "user", "content": ASK}, *first.output, {"role": "user", "content": "And of Italy?"}]
    same = create(stored, input=whole, instructions="Be brief.", store=False)
    assert second.output_text == same.output_text and second.previous_response_id == first.id
    assert second.usage.input_tokens == same.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    third = create(stored, input="Thanks.", previous_response_id=second.id)  # instructions are not carried over
    assert [item.role for item in stored.responses.input_items.list(third.id, order="asc")] == [
        *("user", "assistant", "user", "assistant", "user")
    ]


def test_a_stream_is_stored_when_it_has_ended(stored) -> None:
    *_, last = create(stored, input=ASK, stream=True)
    assert last.type == "response.completed" and last.response.store
    assert stored.responses.retrieve(last.response.id) == last.response
    assert create(stored, input="And of Italy?", previous_response_id=last.response.id).output_text


def test_items_are_listed_in_pages(stored) -> None:
    first = create(stored, input=[{"role": "user", "content": ASK}, {"role": "user", "content": "Now."}])
    newest = stored.responses.input_items.list(first.id, limit=1)
    assert newest.has_more and newest.data[0].content[0].text == "Now." and newest.data[0].status == "completed"
    assert [item.content[0].text for item in newest] == ["Now.", ASK]  # the client follows `after`


def test_a_deleted_response_is_gone_and_what_continues_it_stays(stored) -> None:
    first = create(stored, input=ASK)
    second = create(stored, input="And of Italy?", previous_response_id=first.id)
    stored.responses.delete(first.id)
    for use in (stored.responses.retrieve, stored.responses.delete, stored.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            use(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        create(stored, input="Go on.", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    assert create(stored, input="And of Spain?", previous_response_id=second.id).output_text


def test_references_to_items(stored) -> None:
    first = create(stored, input=ASK)
    question = {"role": "user", "content": "And of Italy?"}
    reference = {"type": "item_reference", "id": first.output[0].id}
    answer = create(stored, input=[{"role": "user", "content": ASK}, reference, question])
    same = create(stored, input=question["content"], previous_response_id=first.id)
    assert answer.output_text == same.output_text and answer.usage.input_tokens == same.usage.input_tokens
    ends = [create(stored, input="Thanks.", previous_response_id=one.id).usage for one in (answer, same)]
    assert ends[0].input_tokens == ends[1].input_tokens  # what a reference named is part of the conversation
    assert [item.role for item in stored.responses.input_items.list(answer.id, order="asc")] == [
        *("user", "assistant", "user")
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        create(stored, input=[{"type": "item_reference", "id": "msg_1"}])
    assert caught.value.param == "input[0].id"


def test_a_key_has_its_own_responses(serve) -> None:
    address, _ = serve(store_responses_s=600.0, api_keys=KEYS)
    ann, bob = (openai_client(address, api_key=key) for key in ("ann-key", "bob-key"))
    first = create(ann, input=ASK)
    assert ann.responses.retrieve(first.id).output_text == first.output_text
    for use in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            use(first.id)
    with pytest.raises(openai.BadRequestError):
        create(bob, input="And of Italy?", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError):
        create(bob, input=[{"type": "item_reference", "id": first.output[0].id}])
    assert ann.responses.retrieve(first.id).output_text == first.output_text


def test_calls_of_an_earlier_response_are_answered() -> None:
    server = ScriptedServer(store_responses_s=600.0)
    server.scheduler.answer = lambda prompt, request: CALL
    body = {"model": "default", "tools": [TOOL]}
    first = server.post("/v1/responses", body | {"input": "hi"}).json()
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "12"}
    body |= {"input": [result], "previous_response_id": first["id"]}
    assert server.post("/v1/responses", body).status_code == 200
    body["input"] = [result | {"call_id": "call_other"}]
    assert server.post("/v1/responses", body).json()["error"]["param"] == "input[0].call_id"


def test_what_is_not_stored() -> None:
    server = ScriptedServer(store_responses_s=600.0, max_response_bytes_per_key=4096)
    server.scheduler.answer = lambda prompt, request: "Fine."
    body = {"model": "default", "input": "hi"}
    refused = server.post("/v1/responses", body | {"store": False}).json()
    assert refused["store"] is False and not server.app.state.plait.responses.get(refused["id"], "")
    large = server.post("/v1/responses", body | {"input": "x" * 5000}).json()
    assert large["store"] is False and "of at most 4096" in large["warnings"][0]
    assert server.app.state.plait.responses.held.held("") == 0


def test_an_incomplete_response_is_stored_without_its_logprobs_as_items() -> None:
    server = ScriptedServer(store_responses_s=600.0)
    server.scheduler.answer = lambda prompt, request: "A long answer."
    body = {"model": "default", "input": "hi", "max_output_tokens": 5, "include": ["message.output_text.logprobs"]}
    response = server.post("/v1/responses", body).json()
    assert response["status"] == "incomplete" and response["output"][0]["content"][0]["logprobs"]
    kept = server.app.state.plait.responses.get(response["id"], "")
    assert b'"logprobs":[{' in kept.body and b'"logprobs":[]' in kept.items.output
    body["previous_response_id"] = response["id"]
    assert server.post("/v1/responses", body).status_code == 200


def test_without_the_option() -> None:
    server = ScriptedServer()
    server.scheduler.answer = lambda prompt, request: "Fine."
    body = {"model": "default", "input": "hi"}
    answer = server.post("/v1/responses", body | {"store": True}).json()
    assert answer["store"] is False and "--store-responses" in answer["warnings"][0]
    assert "warnings" not in server.post("/v1/responses", body).json()
    for wrong in ({"previous_response_id": "resp_1"}, {"input": [{"type": "item_reference", "id": "msg_1"}]}):
        error = server.post("/v1/responses", body | wrong).json()["error"]
        assert error["code"] == "unsupported_parameter" and "--store-responses" in error["message"]


def test_the_option_needs_keys_or_loopback() -> None:
    settings = server_settings(host="0.0.0.0", port=0, store_responses_s=60.0)
    with pytest.raises(InputError, match="--store-responses needs API keys"):
        run_server(None, settings)


def test_queries_of_a_stored_response(serve) -> None:
    address, _ = serve(store_responses_s=600.0)
    with contextlib.closing(httpx.Client(base_url=address, timeout=60)) as http:
        body = {"model": "default", "input": "hi", "max_output_tokens": 16}
        path = f"/v1/responses/{http.post('/v1/responses', json=body).json()['id']}"
        assert http.get(path, params={"stream": "false"}).json()["object"] == "response"
        for query in ({"stream": "true"}, {"starting_after": "3"}):
            answer = http.get(path, params=query)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(query))
        assert http.get(f"{path}/input_items", params={"limit": "0"}).status_code == 400
        assert http.delete(path).json() == {"id": path.rpartition("/")[2], "object": "response", "deleted": True}
        assert http.get(path).status_code == 404
