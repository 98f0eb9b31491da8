"""Streams of /generate and /v1/programs that their client does not read: bounded, ended with an error, and freed."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from stalled_stream import stop_after
from waiting import wait_until

from plait.runtime.server.generation import submission
from plait.runtime.server.protocols.programs import endpoint

LIMIT_BYTES = 1 << 14
PATIENCE_S = 60.0
GENERATE = {
    "text": "One, two,",
    "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
    "stream": True,
    "return_logprob": True,
    "top_logprobs_num": 20,
}
GEN = {"gen": {"max_tokens": 2000, "ignore_eos": True, "name": "x"}}
PROGRAM = {"program": [{"text": "One, two,"}, {"fork": {"branches": [[GEN], [GEN]]}}], "stream": True}


@pytest.mark.parametrize(("path", "body"), [("/generate", GENERATE), ("/v1/programs", PROGRAM)])
def test_an_unread_stream_is_aborted(serve, engine, idle, monkeypatch, path, body) -> None:
    monkeypatch.setattr(submission, "MAX_UNREAD_BYTES", LIMIT_BYTES)
    monkeypatch.setattr(endpoint, "MAX_UNREAD_BYTES", LIMIT_BYTES)
    may_go_on = threading.Event()
    monkeypatch.setattr("plait.runtime.server.http.response.EventStream._send_events", stop_after(2, may_go_on))
    address, state = serve()
    with httpx.stream("POST", f"{address}{path}", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)  # the calls run now, and nothing more is taken until they have ended
        assert wait_until(lambda: engine.client.status().running_calls == 0, PATIENCE_S)
        assert not may_go_on.is_set() and state.in_flight.num_admitted == 1
        may_go_on.set()
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert data[-1]["error"]["code"] == "aborted" and "did not read its stream" in data[-1]["error"]["message"]
    assert sum(len(event.get("delta", "")) for event in data) < LIMIT_BYTES
    last = max((event["meta_info"]["completion_tokens"] for event in data if "meta_info" in event), default=0)
    assert last < 1000


def test_a_program_whose_last_events_were_dropped_does_not_complete(serve, engine, idle, monkeypatch) -> None:
    """The calls have ended before the limit is exceeded, by the events of their ends."""
    monkeypatch.setattr(endpoint, "MAX_UNREAD_BYTES", 1)
    may_go_on = threading.Event()
    monkeypatch.setattr("plait.runtime.server.http.response.EventStream._send_events", stop_after(1, may_go_on))
    address, _ = serve()
    program = [{"text": "One,"}, {"select": {"choices": ["a", "b"], "name": "x"}}]
    program = [*program, *program[1:], *program[1:]]
    with httpx.stream(
        "POST", f"{address}/v1/programs", json={"program": program, "stream": True}, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert wait_until(lambda: engine.client.status().sessions == 0, PATIENCE_S)
        may_go_on.set()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["type"] == "error" and "did not read its stream" in events[-1]["error"]["message"]
