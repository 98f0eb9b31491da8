"""A disconnect of the client ends its request: the pages are free, it is counted, and it is not logged as an error."""

from __future__ import annotations

import json
import logging
import socket

import pytest
from waiting import wait_until

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
GEN = {"gen": {"max_tokens": 2000, "ignore_eos": True}}
ENDLESS_JSON = {"type": "string", "minLength": 20000}
# path -> (a body whose answer would run for long, the calls it has at once)
REQUESTS = {
    "/v1/completions": (
        {"model": "default", "prompt": "One, two,", "max_tokens": 2000, "ignore_eos": True, "n": 3},
        3,
    ),
    "/v1/messages": (
        {
            "model": "default",
            "messages": MESSAGES,
            "max_tokens": 4000,
            "output_config": {"format": {"type": "json_schema", "schema": ENDLESS_JSON}},
        },
        1,
    ),
    "/generate": ({"text": ["Once", "Twice"], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}, 2),
    "/api/chat": ({"model": "default", "messages": MESSAGES, "format": ENDLESS_JSON}, 1),
    "/v1/programs": (
        {"model": "default", "program": [{"text": "Once"}, GEN, {"fork": {"branches": [[GEN], [GEN]]}}]},
        1,
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_disconnect_frees_the_pages_of_a_request(serve, engine, idle, caplog, path, stream) -> None:
    address, state = serve()
    host, port = address.removeprefix("http://").split(":")
    fields, num_calls = REQUESTS[path]
    body = json.dumps({**fields, "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert wait_until(lambda: engine.client.status().running_calls == num_calls)
        assert engine.client.status().used_pages > 0
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert wait_until(lambda: engine.client.status().used_pages == 0)
    assert wait_until(lambda: state.in_flight.num_admitted == 0)
    assert wait_until(lambda: state.metrics.aborts.values.get(("client_gone",)) == 1)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
