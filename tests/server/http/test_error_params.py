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
