"""`chat_template_kwargs` and each protocol's own switch for reasoning, where chat templates are rendered."""

from __future__ import annotations

from typing import Any

import pytest
from qwen3_template import QWEN3
from scripted_server import ScriptedServer

from plait.runtime.messages import Append

ASK = [{"role": "user", "content": "hi"}]
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
NO_REASONING = "<think>\n\n</think>\n\n"
MESSAGES = {"model": "default", "messages": ASK, "max_tokens": 2}
CHAT, RESPONSE = MESSAGES, {"model": "default", "input": "hi", "max_output_tokens": 2}
OLLAMA = {"model": "default", "stream": False}
PROGRAM = {"program": [{"role": "user", "content": [{"text": "hi"}]}, {"role": "assistant", "content": [{"gen": {}}]}]}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGES,
    "/api/chat": OLLAMA | {"messages": ASK},
    "/api/generate": OLLAMA | {"prompt": "hi"},
    "/v1/programs": PROGRAM,
}


@pytest.fixture(scope="module")
def server():
    server = ScriptedServer()
    server.client.tokenizer.replace_chat_template(QWEN3)
    yield server
    server.client.close()


def prompt_of(server, path, **fields) -> str:
    """The text of the prompt that a request sends to the scheduler."""
    before = len(server.scheduler.sent(Append))
    response = server.post(path, ENDPOINTS[path] | fields)
    assert response.status_code == 200, response.text
    appended = server.scheduler.sent(Append)[before:]
    return server.client.tokenizer.decode([token for message in appended for token in message.token_ids])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_chat_template_kwargs(server, path) -> None:
    plain = prompt_of(server, path)
    assert plain.endswith("assistant\n")  # decoded without control tokens
    assert prompt_of(server, path, chat_template_kwargs=OFF) == plain + NO_REASONING
    assert prompt_of(server, path, chat_template_kwargs=ON) == plain
    response = server.post(path, ENDPOINTS[path] | {"chat_template_kwargs": {"enable_thinkin": True}})
    assert response.status_code == 400 and "no variable 'enable_thinkin'" in response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/programs"])
def test_enable_thinking_alone(server, path) -> None:
    assert prompt_of(server, path, enable_thinking=False).endswith(NO_REASONING)
    response = server.post(path, ENDPOINTS[path] | {"enable_thinking": False, "chat_template_kwargs": ON})
    assert response.status_code == 400 and "contradict each other" in response.text


@pytest.mark.parametrize(
    ("path", "off", "on"),
    [
        ("/v1/messages", {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}),
        ("/api/chat", {"think": False}, {"think": True}),
        ("/api/generate", {"think": False}, {"think": True}),
    ],
)
def test_the_protocols_own_switch(server, path, off, on) -> None:
    plain = prompt_of(server, path)
    assert prompt_of(server, path, **off) == plain + NO_REASONING
    assert prompt_of(server, path, **on) == plain
    assert prompt_of(server, path, **on, chat_template_kwargs=OFF) == plain + NO_REASONING


def test_the_switches_do_not_concern_templates_without_the_variable(server) -> None:
    other = ScriptedServer()
    other.client.tokenizer.replace_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    plain = prompt_of(other, "/api/chat")
    assert prompt_of(other, "/api/chat", think=False) == prompt_of(other, "/v1/messages", thinking={"type": "disabled"})
    assert prompt_of(other, "/api/chat", think=False) == plain
    other.client.close()


def test_tokenize_and_count_tokens(server) -> None:
    counts = [
        server.post("/tokenize", {"messages": ASK, "chat_template_kwargs": kwargs}).json()["count"]
        for kwargs in ({}, OFF)
    ]
    assert counts[1] - counts[0] == len(NO_REASONING)
    counts = [
        server.post("/v1/messages/count_tokens", {"model": "default", "messages": ASK, **fields}).json()["input_tokens"]
        for fields in ({}, {"chat_template_kwargs": OFF}, {"thinking": {"type": "disabled"}})
    ]
    assert counts[1] - counts[0] == counts[2] - counts[0] == len(NO_REASONING)
    wrong = server.post("/tokenize", {"prompt": "hi", "chat_template_kwargs": OFF})
    assert wrong.status_code == 400 and "needs 'messages'" in wrong.text


def test_a_raw_prompt_has_no_template(server) -> None:
    response = server.post("/api/generate", OLLAMA | {"prompt": "hi", "raw": True, "chat_template_kwargs": OFF})
    assert response.status_code == 400 and "no effect on a prompt without a template" in response.text


@pytest.mark.parametrize("text", ["<|im_end|>", "x <|im_e", "d|>"])
def test_variables_of_a_program_cannot_hold_control_tokens(server, text) -> None:
    other = ScriptedServer()
    other.client.tokenizer.replace_chat_template(
        "{% for m in messages %}<|im_start|>{{ mark }}{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert "plain" in prompt_of(other, "/v1/programs", chat_template_kwargs={"mark": "plain"})
    response = other.post("/v1/programs", PROGRAM | {"chat_template_kwargs": {"mark": text}})
    assert response.status_code == 400 and "control token" in response.text
    other.client.close()
