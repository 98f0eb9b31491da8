"""A path without an endpoint: the answer names the endpoint that is meant, and how to correct the base URL."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("path", "meant", "advice"),
    [
        ("/chat/completions", "/v1/chat/completions", "let the base URL of the client end with /v1"),
        ("/v1/v1/messages", "/v1/messages", "let the base URL of the client end without /v1"),
        ("/v1/generate", "/generate", "let the base URL of the client end without /v1"),
        ("/v1/chat/completion", "/v1/chat/completions", ""),
    ],
)
def test_a_path_that_is_nearly_right(http, path, meant, advice):
    answer = http.post(path, json={})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert f"there is no endpoint '{path}'; perhaps {meant} is meant" in message and advice in message


def test_a_path_that_resembles_none(http):
    answer = http.get("/nothing/of/the/kind")
    assert answer.status_code == 404 and "GET /openapi.json lists all" in answer.json()["error"]["message"]
    long = http.get("/" + "x" * 5000)
    assert long.status_code == 404 and len(long.json()["error"]["message"]) < 300
