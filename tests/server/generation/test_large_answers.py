"""Large answers that are made of lists are made in a thread: token lists and vectors."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from plait.runtime.call_reports import Usage
from plait.runtime.client.call import CallResult
from plait.runtime.server.generation import embedding
from plait.runtime.server.protocols.openai import embeddings, tokenize
from plait.runtime.server.settings import server_settings


@pytest.fixture
def threads(monkeypatch):
    """The threads that made answers."""
    found = []

    def recorded(module, name):
        made_by = getattr(module, name)

        def make(*args):
            found.append(threading.get_ident())
            return made_by(*args)

        monkeypatch.setattr(module, name, make)

    recorded(tokenize, "_tokenized")
    recorded(embeddings, "_response")
    recorded(embedding, "_tokenize_all")
    return found


@pytest.mark.parametrize(("count", "is_aside"), [(1, False), (30, True)])
def test_token_lists(threads, monkeypatch, count, is_aside) -> None:
    body = tokenize.TokenizeRequest(prompt=["a"] * count, return_token_strs=True)
    model = SimpleNamespace(client=SimpleNamespace(model=SimpleNamespace(context_length=8)), settings=server_settings())

    async def use_model(*_):
        return model

    async def answer(*_):
        return body

    async def token_lists(*_):
        return [[1] * 100] * count

    monkeypatch.setattr(tokenize, "read_json", answer)
    monkeypatch.setattr(tokenize, "use_model", use_model)
    monkeypatch.setattr(tokenize, "_prompts", token_lists)
    monkeypatch.setattr(tokenize, "token_text", lambda client, token: "é")
    response = asyncio.run(tokenize.tokenize_prompt(None))
    assert threads == [threads[0]] and (threads[0] != threading.get_ident()) == is_aside
    expected = tokenize.Tokenized([[1] * 100] * count, [100] * count, 8, [["é"] * 100] * count)
    assert response.body == tokenize.msgspec.json.encode(expected)


@pytest.mark.parametrize(("count", "is_aside"), [(2, False), (100, True)])
def test_vectors(threads, monkeypatch, count, is_aside) -> None:
    vector = np.ones(4, "<f4").tobytes()
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=0)
    results = [CallResult("", "stop", usage, embedding_bytes=vector)] * count

    async def no_results(*_):
        return results

    async def body(*_):
        return embeddings.EmbeddingRequest(model="m", input=[[1]] * count)

    info = SimpleNamespace(embeddings=object(), vocab_size=9)

    async def use_model(*_):
        return SimpleNamespace(client=SimpleNamespace(model=info), name="m")

    for name, value in {
        "read_json": body,
        "use_model_in_turn": use_model,
        "tenant_of": lambda request: "",
        "embed_in_turn": no_results,
    }.items():
        monkeypatch.setattr(embeddings, name, value)
    response = asyncio.run(embeddings.create_embedding(None))
    assert (threads[0] != threading.get_ident()) == is_aside
    assert len(tokenize.msgspec.json.decode(response.body)["data"]) == count


def test_long_lists_of_ids_are_checked_in_a_thread(threads, monkeypatch) -> None:
    monkeypatch.setattr(embedding, "max_token_bytes", lambda vocabulary: 8)
    model = SimpleNamespace(vocab_size=9, context_length=1 << 20)
    client = SimpleNamespace(model=model, tokenizer=SimpleNamespace(vocabulary=None))
    lists = [[8] * 1000] * 30
    assert asyncio.run(embedding.tokenize_inputs(client, lists, "input")) == lists
    assert threads[0] != threading.get_ident()
    with pytest.raises(Exception, match="not from 0 to 8"):
        asyncio.run(embedding.tokenize_inputs(client, [[1, 9]], "input"))
