"""A program counts against the limits as the calls that it can have in flight at once."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from plait.runtime.server.app import create_app
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.settings import server_settings

KEYS = {"alice": digest(b"a-key"), "bob": digest(b"b-key")}


def forked(num_branches, max_tokens=2):
    branch = [{"text": "One, two,"}, {"gen": {"max_tokens": max_tokens, "ignore_eos": True}}]
    return {"program": [{"text": "a"}, {"fork": {"branches": [branch] * num_branches}}]}


@pytest.fixture
def served(engine):
    def make(**settings):
        return create_app(engine, server_settings(api_keys=KEYS, retry_after_s=7, **settings))

    return make


def run(app, work):
    async def go():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host", timeout=60) as client:

            async def one(key, body, path="/v1/programs"):
                return await client.post(path, json=body, headers={"x-api-key": key})

            return await work(one)

    answer = asyncio.run(go())
    in_flight, queue = app.state.plait.in_flight, app.state.plait.admission.queue
    assert (in_flight.num_admitted, queue.num_calls, len(in_flight.records)) == (0, 0, 0)
    assert in_flight.num_of_tenant("alice") == in_flight.num_of_tenant("bob") == 0
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("settings", "owner"), [({"max_requests_per_key": 4}, "one key"), ({"max_running": 3, "max_queue": 1}, "server")]
)
def test_a_program_that_exceeds_a_limit_alone_is_refused(served, settings, owner, stream) -> None:
    async def work(one):
        return await one("a-key", {**forked(5), "stream": stream}), await one("a-key", {**forked(4), "stream": stream})

    refused, fits = run(served(**settings), work)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "too_many_calls", "program")
    assert "5 calls" in error["message"] and owner in error["message"] and error["message"].endswith("can have 4")
    assert fits.status_code == 200


def test_the_calls_of_a_program_count_against_its_key(served) -> None:
    app = served(max_requests_per_key=4)
    in_flight, queue = app.state.plait.in_flight, app.state.plait.admission.queue

    async def work(one):
        three = asyncio.create_task(one("a-key", forked(3, max_tokens=1500)))
        while queue.num_calls < 3 and not three.done():
            await asyncio.sleep(0)
        assert (queue.num_calls, in_flight.num_of_tenant("alice")) == (3, 3)
        own = [await one("a-key", forked(2)), await one("a-key", forked(1))]
        other = await one("b-key", forked(4))
        assert (queue.num_calls, in_flight.num_of_tenant("alice"), in_flight.num_of_tenant("bob")) == (3, 3, 0)
        three.cancel()
        await asyncio.wait([three])
        return own, other

    (two, single), other = run(app, work)
    assert (two.status_code, two.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert two.headers["retry-after"] == "7"
    assert "3 requests running" in two.json()["error"]["message"] and "needs 2" in two.json()["error"]["message"]
    assert single.status_code == other.status_code == 200


def test_the_calls_of_a_program_fill_the_queue(served) -> None:
    app = served(max_running=4, max_queue=1)
    state = app.state.plait

    async def work(one):
        five = asyncio.create_task(one("a-key", forked(5, max_tokens=1500)))
        while state.admission.queue.num_calls < 5 and not five.done():
            await asyncio.sleep(0)
        assert state.admission.queue.refusal("alice") is not None and not state.admission.is_full
        request = {"model": "default", "prompt": "One", "max_tokens": 1}
        refused, other = [await one(key, request, "/v1/completions") for key in ("a-key", "b-key")]
        five.cancel()
        await asyncio.wait([five])
        return refused, other

    refused, other = run(app, work)
    assert other.status_code == 200  # it is within the share of its key
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert not state.admission.is_full
