"""A chat template that replaces the model's, and further variables of templates in chat requests."""

from __future__ import annotations

import msgspec
import pytest
from scripted_scheduler import CHATML, ScriptedScheduler, byte_tokenizer
from scripted_server import ScriptedServer

from plait.runtime.client.client import Client
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.messages import Append
from plait.runtime.process.engine import Engine
from plait.runtime.process.runtime import Runtime

THINKING = (
    CHATML
    + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ mark or '' }}"
)
ASK = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    server = ScriptedServer()
    server.client.tokenizer.replace_chat_template(THINKING)
    yield server
    server.client.close()


def prompt_of(server, **fields):
    """The text of the prompt that a chat request sends to the scheduler."""
    before = len(server.scheduler.sent(Append))
    response = server.post("/v1/chat/completions", ASK | fields)
    assert response.status_code == 200, response.text
    ids = [token for message in server.scheduler.sent(Append)[before:] for token in message.token_ids]
    return server.client.tokenizer.decode(ids), ids


def test_thinking_is_switched_off_under_both_names(server) -> None:
    plain, _ = prompt_of(server)
    assert not plain.endswith("<think></think>") and prompt_of(server, enable_thinking=True)[0] == plain
    for fields in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert prompt_of(server, **fields)[0] == plain + "<think></think>"


def test_text_in_a_variable_does_not_become_a_control_token(server) -> None:
    _, plain = prompt_of(server)
    _, ids = prompt_of(server, chat_template_kwargs={"mark": "<|im_end|>"})
    assert ids == plain + list(b"<|im_end|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"chat_template_kwargs": {"enable_thinkin": False}},
            "no variable 'enable_thinkin'; it has: enable_thinking, mark",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "'messages' is set by the server"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "contradict each other"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)
def test_variables_that_would_have_no_effect_are_errors(server, fields, message) -> None:
    response = server.post("/v1/chat/completions", ASK | fields)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_a_client_uses_the_template_of_its_runtime() -> None:
    scheduler = ScriptedScheduler()
    scheduler.welcome = msgspec.structs.replace(
        scheduler.welcome, chat_template="{{ messages[0].content }}{{ eos_token }}"
    )
    client = Client(scheduler, byte_tokenizer(None))
    assert client.tokenizer.chat_template.render([{"role": "user", "content": "hi"}]) == "hi<|im_end|>"
    client.close()


def test_a_template_is_a_text_or_a_file(tmp_path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    assert {engine_config(chat_template=given).chat_template for given in (CHATML, file, str(file))} == {CHATML}
    for given in ("", 3, str(tmp_path / "none"), tmp_path):
        with pytest.raises(InputError, match="chat_template"):
            engine_config(chat_template=given)


@pytest.mark.parametrize("start", [Runtime, Engine])
def test_an_invalid_template_is_an_error_before_the_model_is_loaded(start) -> None:
    with pytest.raises(InputError, match="chat_template: the chat template is not valid"):
        start("no such model", chat_template="{% for %}")


def test_a_model_takes_turns_in_the_given_template() -> None:
    with Engine(
        max_pages=100, chat_template="{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    ) as engine:
        assert engine.client.tokenizer.chat_template.turn_prefix(["user"], "assistant") == "[assistant] "
