"""`/v1/embeddings` and Ollama's endpoints with their own clients; the vectors of a tiny model equal transformers'."""

from __future__ import annotations

import asyncio
import base64
import threading

import httpx
import msgspec
import numpy as np
import ollama
import openai
import pytest
from asgi_server import serve_app
from openai.types import CreateEmbeddingResponse, Embedding
from tiny_embedding_model import SIZE, TEXTS, states, token_ids, write_embedder
from waiting import wait_until

from plait.runtime.process.engine import Engine
from plait.runtime.server.app import create_app
from plait.runtime.server.generation import embedding
from plait.runtime.server.settings import server_settings

MODEL = "default"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("embedder")


@pytest.fixture(scope="module")
def reference_model(folder):
    return write_embedder(folder)


@pytest.fixture(scope="module")
def engine(folder, reference_model):
    settings = dict(device="cpu", dtype="float32", max_pages=3000, max_batch_tokens=32)
    with Engine(str(folder), **settings, deterministic=True, check_integrity=True) as engine:
        yield engine
        status = engine.client.status()
        assert (status.used_pages, status.running_calls, status.sessions) == (0, 0, 0)


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, server_settings(api_keys={}))


@pytest.fixture(scope="module")
def base_url(app):
    with serve_app(app) as address:
        yield address


@pytest.fixture(scope="module")
def embedder(base_url):
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected(folder, reference_model):
    def vector(text):
        last = states(reference_model, token_ids(folder, text))[-1]
        return last / np.linalg.norm(last)

    return vector


def test_vectors_equal_those_of_transformers(embedder, expected, folder) -> None:
    answer = embedder.embeddings.create(model=MODEL, input=TEXTS)  # the client asks for base64 by default
    assert isinstance(answer, CreateEmbeddingResponse) and answer.object == "list" and answer.model == MODEL
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(token_ids(folder, t)) for t in TEXTS)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    for text, item in zip(TEXTS, answer.data, strict=True):
        assert isinstance(item, Embedding) and item.object == "embedding"
        np.testing.assert_allclose(item.embedding, expected(text), atol=1e-4)
    for encoding in ("float", "base64"):
        embedding = embedder.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format=encoding, user="me").data[0]
        numbers = embedding.embedding
        if encoding == "base64":
            numbers = np.frombuffer(base64.b64decode(numbers), "<f4").tolist()
        assert numbers == answer.data[1].embedding


def test_token_lists_get_no_special_tokens(embedder, folder) -> None:
    ids = [token_ids(folder, text) for text in TEXTS]
    by_text = embedder.embeddings.create(model=MODEL, input=TEXTS)
    by_ids = embedder.embeddings.create(model=MODEL, input=ids)
    assert [item.embedding for item in by_ids.data] == [item.embedding for item in by_text.data]
    one = embedder.embeddings.create(model=MODEL, input=ids[0])
    assert one.data[0].embedding == by_text.data[0].embedding and len(one.data) == 1


def test_cut_vectors_are_normalized(embedder, expected) -> None:
    cut = embedder.embeddings.create(model=MODEL, input=TEXTS[1], dimensions=8).data[0].embedding
    expected_vector = expected(TEXTS[1])[:8]
    np.testing.assert_allclose(cut, expected_vector / np.linalg.norm(expected_vector), atol=1e-4)


def test_model_prompt_precedes_texts_but_not_tokens(base_url, embedder, engine, monkeypatch) -> None:
    def vector(inputs):
        return embedder.embeddings.create(model=MODEL, input=inputs).data[0].embedding

    text, ids = TEXTS[1], engine.client.encode_for_embedding(TEXTS[1])
    before, prompted = vector(text), vector(f"Query: {text}")
    made = msgspec.structs.replace(engine.client.model.embeddings, prompt="Query: ")
    monkeypatch.setattr(engine.client, "model", msgspec.structs.replace(engine.client.model, embeddings=made))
    assert vector(text) == prompted == ollama.Client(host=base_url).embed(MODEL, text).embeddings[0]
    assert vector(ids) == before != prompted


def test_ollama_client(base_url, expected) -> None:
    client = ollama.Client(host=base_url)
    many = client.embed(MODEL, TEXTS)
    for text, vector in zip(TEXTS, many.embeddings, strict=True):
        np.testing.assert_allclose(vector, expected(text), atol=1e-4)
    assert many.prompt_eval_count > 0 and many.total_duration > 0
    assert client.embed(MODEL, TEXTS[0], dimensions=4).embeddings[0] == pytest.approx(
        (expected(TEXTS[0])[:4] / np.linalg.norm(expected(TEXTS[0])[:4])).tolist(), abs=1e-4
    )
    old = np.array(client.embeddings(MODEL, TEXTS[0]).embedding)
    assert np.linalg.norm(old) > 2, "as it is pooled"
    np.testing.assert_allclose(old / np.linalg.norm(old), expected(TEXTS[0]), atol=1e-4)
    assert list(client.embed(MODEL, "").embeddings) == [] == list(client.embeddings(MODEL, "").embedding)
    assert "embedding" in client.show(MODEL).capabilities


def test_ollama_truncation_keeps_the_end_token(base_url, engine) -> None:
    client, long = ollama.Client(host=base_url), "abcdefgh" * 100
    tokens = engine.client.tokenizer.encode_with_special_tokens(long)
    for limit, options in ((512, None), (20, {"num_ctx": 20})):
        cut = [*tokens[: limit - 1], *engine.client.tokenizer.suffix_ids]
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none") as openai_client:
            expected_vector = openai_client.embeddings.create(model=MODEL, input=cut).data[0].embedding
        assert client.embed(MODEL, long, options=options).embeddings[0] == pytest.approx(expected_vector)
    with pytest.raises(ollama.ResponseError, match="512 tokens"):
        client.embed(MODEL, long, truncate=False)
    body = {"model": MODEL, "input": "a", "options": {"temperature": 0.5}}
    answer = httpx.post(f"{base_url}/api/embed", json=body, timeout=60).json()
    assert answer["warnings"] == ["'options.temperature' has no effect: an embedding samples nothing"]


WRONG = {
    "no input": ({"input": []}, "input"),
    "an empty text": ({"input": ""}, "input"),
    "an empty text among others": ({"input": ["a", ""]}, "input[1]"),
    "an empty list among others": ({"input": [[1], []]}, "input[1]"),
    "a mixture": ({"input": ["a", 1]}, "input"),
    "too many": ({"input": ["a"] * 2049}, "input"),
    "a token beyond the vocabulary": ({"input": [1, 258]}, "input"),
    "a token below zero": ({"input": [[1], [-1]]}, "input[1]"),
    "a text beyond the context": ({"input": ["a", "b" * 600]}, "input[1]"),
    "a text far beyond the context": ({"input": "a" * 1_000_000}, "input"),
    "tokens beyond the context": ({"input": [1] * 513}, "input"),
    "more tokens in all than may be": ({"input": [[1] * 512] * 600}, "input"),
    "no dimensions": ({"dimensions": 0}, "dimensions"),
    "more dimensions than there are": ({"dimensions": SIZE + 1}, "dimensions"),
    "half a dimension": ({"dimensions": 1.5}, "dimensions"),
    "another encoding": ({"encoding_format": "int8"}, "encoding_format"),
    "an unknown field": ({"input_type": "query"}, "input_type"),
    "a timeout below zero": ({"timeout": -1}, "timeout"),
    "another model": ({"model": "text-embedding-3-small"}, "model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_field(base_url, name) -> None:
    change, param = WRONG[name]
    answer = httpx.post(f"{base_url}/v1/embeddings", json={"model": MODEL, "input": "a"} | change, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert (
        error["param"] == param and set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 500
    )


def test_model_without_pooling(smollm) -> None:
    with pytest.raises(openai.BadRequestError, match="do not define") as caught:
        smollm.embeddings.create(model=MODEL, input="text")
    assert caught.value.code == "unsupported_by_model" and caught.value.type == "invalid_request_error"
    assert set(caught.value.body) == {"message", "type", "param", "code"} and caught.value.param == "model"


def test_more_inputs_than_run_concurrently(app, embedder, expected, monkeypatch) -> None:
    """The rest waits in the server; the request counts as the calls that run concurrently."""
    monkeypatch.setattr(embedding, "MAX_CONCURRENT_INPUTS", 3)
    queue, most = app.state.plait.admission.queue, []
    set_size = queue.set_size
    monkeypatch.setattr(
        queue, "set_size", lambda place, calls, rows: (most.append((calls, rows)), set_size(place, calls, rows))
    )
    texts = [f"text {i}" for i in range(20)]
    answer = embedder.embeddings.create(model=MODEL, input=texts)
    assert [size for size in most if size != (0, 0)] == [(3, 3)]  # (0, 0): it has ended
    for text, item in zip(texts, answer.data, strict=True):
        np.testing.assert_allclose(item.embedding, expected(text), atol=1e-4)


def test_timeout_applies_to_all_inputs_together(base_url, engine) -> None:
    answer = httpx.post(
        f"{base_url}/v1/embeddings", json={"model": MODEL, "input": ["a b c " * 60] * 50, "timeout": 1e-6}, timeout=60
    )
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
    assert wait_until(lambda: engine.client.status().sessions == 0)


def test_disconnect_frees_all_pages(app, base_url, engine) -> None:
    """The first step waits until the server noticed the disconnect: almost nothing is computed after it."""
    runner, in_flight = engine.engine_loop.model_runner, app.state.plait.in_flight
    begun, gate, forward, computed = threading.Event(), threading.Event(), runner.forward, []

    def waiting(batch):
        begun.set()
        assert gate.wait(60)
        computed.append(batch.num_tokens)
        return forward(batch)

    async def disconnect() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": MODEL, "input": [f"{i} hold " * 50 for i in range(20)]}
            request = asyncio.create_task(client.post(f"{base_url}/v1/embeddings", json=body))
            assert await asyncio.to_thread(begun.wait, 60)
            request.cancel()

    runner.forward = waiting
    try:
        asyncio.run(disconnect())
        assert wait_until(lambda: in_flight.num_admitted == 0)
    finally:
        gate.set()
    assert wait_until(lambda: engine.client.status().sessions == 0)
    runner.forward = forward
    assert engine.client.status().used_pages == 0 and sum(computed) <= 2 * runner.max_batch_tokens


def test_body_limits_and_api_keys(engine) -> None:
    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
    app = create_app(engine, server_settings(api_keys={"a": digest}))
    with serve_app(app) as address:
        url, body = f"{address}/v1/embeddings", {"model": MODEL, "input": "a"}
        assert httpx.post(url, json=body, timeout=60).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        measured = httpx.get(f"{address}/metrics", headers=headers, timeout=60).text
        assert 'plait_request_seconds_count{route="/v1/embeddings",status="200"} 1' in measured
        assert "plait_time_to_first_token_seconds_count 0" in measured, "an embedding has no tokens"
        app.state.plait.admission.is_draining = True
        refused = httpx.post(url, json=body, headers=headers, timeout=60)
        assert refused.status_code == 503 and refused.headers["retry-after"]
