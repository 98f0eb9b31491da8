"""Failures of a remote service: HTTP statuses, retries while it is busy, streams that end early or are malformed."""

from __future__ import annotations

import fake_servers as servers
import pytest

import plait
from plait import assistant, gen, user

pytestmark = pytest.mark.timeout(120)


@plait.function
def ask(s, **keywords):
    s += user("Q") + assistant(gen("x", **keywords))


@pytest.mark.parametrize(
    ("status", "error_type", "requests"),
    [
        (400, plait.CallRejected, 1),
        (401, plait.CallRejected, 1),
        (500, plait.CallFailed, 1),
        (429, plait.Overloaded, 4),
    ],
)
def test_error_status_keeps_the_message_of_the_server(status, error_type, requests):
    server = servers.FakeServer(lambda path, body: (status, {"error": {"message": "not today"}}))
    with pytest.raises(plait.ProgramError, match=f"answered {status}: not today") as caught:
        ask.run(backend=plait.OpenAI("m", server.url))
    assert type(caught.value.__cause__) is error_type and len(server.asked) == requests
    server.close()


def test_a_request_that_must_not_be_repeated_is_not_retried():
    """A plait server says so of a request that was in two runtimes when they ended."""
    error = {"error": {"message": "it has ended 2 times", "code": "runtime_gone"}}
    server = servers.FakeServer(lambda path, body: (503, error, {"x-should-retry": "false"}))
    with pytest.raises(plait.ProgramError, match="it has ended 2 times"):
        ask.run(backend=plait.OpenAI("m", server.url))
    assert len(server.asked) == 1
    server.close()


def test_status_503_is_retried():
    answers = iter([(503, {}), [{"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}]])
    server = servers.FakeServer(lambda path, body: next(answers))
    assert ask.run(backend=plait.OpenAI("m", server.url))["x"] == "yes"
    server.close()


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "the stream ended early"),
        ([{"choices": [{"delta": {"content": "y"}}]}], "the stream ended early"),
        ([b"{nonsense"], "not JSON"),
        ([{"choices": [{"delta": {"refusal": "I will not"}}]}], "the model refused to answer: I will not"),
        ([{"choices": [{"delta": {}, "finish_reason": "content_filter"}]}], "content_filter"),
        ([[1, 2]], "an answer of an unknown form"),
    ],
)
def test_incomplete_or_malformed_stream_is_an_error(events, message):
    server = servers.FakeServer(lambda path, body: events)
    with pytest.raises(plait.ProgramError, match=message):
        ask.run(backend=plait.OpenAI("m", server.url))
    server.close()
