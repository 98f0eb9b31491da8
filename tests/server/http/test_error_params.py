"""Errors about a field that has two names: they use the name that the client sent."""

from __future__ import annotations

import pytest

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_a_limit_out_of_range(http, name, value) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, name: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == name and f"'{name}'" in error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_minimum_above_the_limit(http, name) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, name: 1, "min_tokens": 2})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "min_tokens" and f"'{name}'" in error["message"]


ENDPOINTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "default", "prompt": "a"},
    "/v1/responses": {"model": "default", "input": "a"},
    "/v1/embeddings": {"model": "default", "input": "a"},
    "/generate": {"text": "a"},
    "/v1/programs": {"program": [{"text": "a"}]},
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("value", [-1_000_001, 1_000_001, 1 << 62])
def test_a_priority_out_of_range(http, path, value) -> None:
    answer = http.post(path, json={**ENDPOINTS[path], "priority": value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "priority" and "'priority'" in error["message"]


@pytest.mark.parametrize(("name", "value"), [("dimensions", 0), ("dimensions", -1), ("timeout", 0), ("timeout", 1e300)])
def test_a_number_of_an_embedding_that_no_model_can_use(http, name, value) -> None:
    """Of a model without embeddings: the number is wrong whatever the model is."""
    answer = http.post("/v1/embeddings", json={**ENDPOINTS["/v1/embeddings"], name: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == name and f"'{name}'" in error["message"]


def test_dimensions_of_an_embedding_of_ollama(http) -> None:
    answer = http.post("/api/embed", json={"model": "default", "input": "a", "dimensions": 0})
    assert answer.status_code == 400 and "'dimensions'" in answer.json()["error"]
