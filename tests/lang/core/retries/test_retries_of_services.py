"""`retries` over a chat API: the conversation with the refused answer is sent again."""

from __future__ import annotations

import json
from dataclasses import dataclass

import fake_servers as servers
import pytest

import plait
from plait import assistant, gen, user

pytestmark = pytest.mark.timeout(120)


@dataclass
class Point:
    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is at least 0")


@plait.function
def point(s, retries):
    s += user("Where?") + assistant(gen("point", type=Point, retries=retries))
    s += user("And?") + assistant(gen("more"))


@pytest.fixture
def chat():
    answers = [json.dumps({"value": {"x": number}}) for number in (-1, 3)]
    server = servers.chat(lambda messages, body: answers.pop(0) if "response_format" in body else "Done.")
    yield server
    server.close()


def test_refused_answer_is_a_turn_of_the_next_request(chat):
    state = point.run(2, backend=plait.OpenAI("m", chat.url))
    assert state["point"] == Point(3) and state["more"] == "Done."
    first, second, after = [body["messages"] for body in chat.bodies("/chat/completions")]
    assert first == [{"role": "user", "content": "Where?"}]
    assert second[:2] == [*first, {"role": "assistant", "content": '{"x": -1}'}]
    assert [message["role"] for message in second[2:]] == ["user"] and "x is at least 0" in second[2]["content"]
    assert after == [*first, {"role": "assistant", "content": '{"x": 3}'}, {"role": "user", "content": "And?"}]
    assert len(state.get_meta_info("point").attempts) == 2
