"""Effort, thinking budgets and `think`: one meaning in all protocols, and a limit that holds for free answers too."""

from __future__ import annotations

import httpx
import pytest
from asgi_server import serve_app
from qwen3_template import QWEN3
from scripted_server import ScriptedServer

from plait.constrained.specs import Reasoning
from plait.runtime.messages import Append, Generate
from plait.runtime.process.engine import Engine
from plait.runtime.server.app import create_app
from plait.runtime.server.chat.thinking import EFFORT_TOKENS, FREE_TEXT
from plait.runtime.server.settings import server_settings

ASK = [{"role": "user", "content": "hi"}]
CHAT = {"model": "default", "messages": ASK}
LOW = EFFORT_TOKENS["low"]
ALWAYS_OPEN = QWEN3.partition("{%- if enable_thinking")[0] + "{{- '<think>\\n' }}{%- endif %}"
THINKING = [  # (path, body without effort, fields for low effort, fields for none)
    ("/v1/chat/completions", CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}),
    ("/v1/chat/completions", CHAT, {"reasoning": {"effort": "low"}}, {"reasoning": {"enabled": False}}),
    ("/v1/chat/completions", CHAT, {"reasoning": {"max_tokens": LOW}}, {"reasoning": {"effort": "none"}}),
    (
        "/v1/responses",
        {"model": "default", "input": "hi"},
        {"reasoning": {"effort": "low"}},
        {"reasoning": {"effort": "none"}},
    ),
    (
        "/v1/messages",
        CHAT | {"max_tokens": 99},
        {"thinking": {"type": "enabled", "budget_tokens": LOW}},
        {"thinking": {"type": "disabled"}},
    ),
    (
        "/v1/messages",
        CHAT | {"max_tokens": 99},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        {"thinking": {"type": "disabled"}},
    ),
    ("/api/chat", CHAT, {"think": "low"}, {"think": False}),
    ("/api/generate", {"model": "default", "prompt": "hi"}, {"think": "low"}, {"think": "none"}),
]


@pytest.fixture(scope="module")
def server():
    server = ScriptedServer()
    server.scheduler.answer = lambda prompt, request: "<think>hm</think>\n\nSome text."
    server.client.tokenizer.replace_chat_template(QWEN3)
    yield server
    server.client.close()


def sent(server, path, body):
    """The prompt's text and the constraint of a request, and its answer."""
    server.scheduler.requests.clear()
    answer = server.post(path, body)
    assert answer.status_code == 200 and "warnings" not in answer.text, answer.text
    ids = [token for append in server.scheduler.sent(Append) for token in append.token_ids]
    return server.client.tokenizer.decode(ids), server.scheduler.sent(Generate)[0].constraint, answer.text


@pytest.mark.parametrize(("path", "body", "low", "none"), THINKING)
def test_an_effort_is_a_limit_of_reasoning_tokens(server, path, body, low, none) -> None:
    plain, constraint, _ = sent(server, path, body)
    assert constraint is None
    prompt, constraint, answer = sent(server, path, body | low)
    assert prompt == plain and constraint == Reasoning(FREE_TEXT, "<think>", "</think>", max_tokens=LOW, lead="\n")
    assert "hm" in answer
    prompt, constraint, _ = sent(server, path, body | none)
    assert prompt == plain + "<think>\n\n</think>\n\n" and constraint is None


def test_an_effort_precedes_a_constraint_and_tools(server) -> None:
    _, constraint, _ = sent(server, "/v1/chat/completions", CHAT | {"regex": "a+", "reasoning_effort": "low"})
    assert isinstance(constraint, Reasoning) and constraint.max_tokens == LOW and constraint.then.pattern == "a+"
    tool = {"type": "function", "function": {"name": "f"}}
    _, constraint, _ = sent(server, "/v1/chat/completions", CHAT | {"tools": [tool], "reasoning_effort": "low"})
    assert isinstance(constraint, Reasoning) and constraint.then.free_text


def test_reasoning_can_be_left_out_of_the_answer(server) -> None:
    for fields in ({"exclude": True}, {"exclude": True, "effort": "low"}):
        _, _, answer = sent(server, "/v1/chat/completions", CHAT | {"reasoning": fields})
        assert "hm" not in answer and "Some text." in answer


def test_a_template_that_always_opens_reasoning_is_closed_where_none_is_wanted() -> None:
    server = ScriptedServer()
    server.client.tokenizer.replace_chat_template(ALWAYS_OPEN)
    plain, _, _ = sent(server, "/v1/chat/completions", CHAT)
    assert plain.endswith("<think>\n")
    prompt, _, _ = sent(server, "/v1/chat/completions", CHAT | {"reasoning_effort": "none"})
    assert prompt == plain + "\n</think>\n\n"
    _, constraint, _ = sent(server, "/v1/chat/completions", CHAT | {"reasoning_effort": "minimal"})
    assert constraint == Reasoning(FREE_TEXT, "", "</think>", max_tokens=EFFORT_TOKENS["minimal"], lead="\n")
    server.client.close()


def test_the_limit_holds_where_the_answer_is_free(small_model, tmp_path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    with (
        Engine(small_model, chat_template=template, max_pages=2000) as engine,
        serve_app(create_app(engine, server_settings())) as address,
    ):
        body = CHAT | {"max_tokens": 60, "seed": 1, "reasoning": {"max_tokens": 5}}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
        message, usage = answer["choices"][0]["message"], answer["usage"]
        assert message["reasoning_content"] and message["content"]
        assert 5 < usage["completion_tokens_details"]["reasoning_tokens"] < 30 <= usage["completion_tokens"]
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body | {"stream": True}, timeout=60) as stream:
            text = "".join(stream.iter_text())
        assert "reasoning_content" in text and "</think>" not in text


@pytest.mark.parametrize("beside", [True, False])
def test_a_template_without_the_switch_takes_enable_thinking(http, beside) -> None:
    """Clients send it to all models: off is what a model that marks no reasoning does, on is listed."""
    for value, warnings in (
        (False, None),
        (True, ["'enable_thinking' has no effect: this model does not mark reasoning"]),
    ):
        fields = {"enable_thinking": value} if beside else {"chat_template_kwargs": {"enable_thinking": value}}
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | fields
        answer = http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json().get("warnings")) == (200, warnings), answer.text


def test_thinking_of_chat_completions_is_that_of_the_others(http) -> None:
    """Off is fulfilled by a model that marks no reasoning, on is listed; `reasoning` beside it is refused."""
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    listed = ["'thinking' has no effect: this model does not mark reasoning"]
    for kind, warnings in (("disabled", None), ("enabled", listed), ("adaptive", listed)):
        answer = http.post("/v1/chat/completions", json=body | {"thinking": {"type": kind}})
        assert (answer.status_code, answer.json().get("warnings")) == (200, warnings), answer.text
    both = http.post("/v1/chat/completions", json=body | {"thinking": {"type": "enabled"}, "reasoning": {}})
    assert both.status_code == 400 and both.json()["error"]["param"] == "thinking"
