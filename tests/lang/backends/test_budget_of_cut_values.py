"""A value that the rest of a budget cuts off over HTTP: the error is the budget's, as with a runtime."""

from __future__ import annotations

import fake_servers as servers
import pytest

import plait
from plait import Budget, assistant, gen, user

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["chat", "sglang"])
def backend(request):
    def cut(path, body):
        usage = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}
        end = {"choices": [{"delta": {}, "finish_reason": "length"}]}
        return [{"choices": [{"delta": {"content": '{"val'}}]}, end, {"choices": [], "usage": usage}, b"[DONE]"]

    server = servers.FakeServer(cut) if request.param == "chat" else servers.sglang(lambda text, body: "12345")
    made = plait.OpenAI("m", server.url) if request.param == "chat" else plait.RuntimeEndpoint(server.url)
    yield made, request.param
    server.close()


@plait.function
def count(s, is_chat, max_tokens):
    number = gen("n", type=int, max_tokens=max_tokens)
    s += user("Count.") + assistant(number) if is_chat else "Count:" + number


def test_the_error_names_the_budget_where_it_cut_the_value(backend):
    client, kind = backend
    with pytest.raises(plait.ProgramError, match=r"the budget of 3 tokens is spent .*: max_tokens=3 cut the value off"):
        count.run(kind == "chat", 64, backend=client, budget=Budget(tokens=3))


def test_the_error_names_max_tokens_where_that_cut_the_value(backend):
    client, kind = backend
    with pytest.raises(plait.ProgramError, match="ConstraintFailed: max_tokens=3 cut the value off"):
        count.run(kind == "chat", 3, backend=client, budget=Budget(tokens=500))
