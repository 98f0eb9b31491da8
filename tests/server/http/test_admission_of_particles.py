"""A request with `particles` or `exact` counts against the limits as the rows that its calls can occupy."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from plait.runtime.sampling_params import MAX_SEARCH_ROWS
from plait.runtime.server.app import create_app
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.settings import server_settings

KEYS = {"alice": digest(b"a-key"), "bob": digest(b"b-key")}
LONG = {"model": "default", "prompt": "One, two,", "max_tokens": 2000, "ignore_eos": True}
DRAWN = {"model": "default", "prompt": "One", "max_tokens": 4, "regex": "[a-z]{1,3}"}


@pytest.fixture
def ask(engine):
    """ask(settings, work): runs `await work(post, in_flight)` on a server with two keys."""

    def run(work, **settings):
        app = create_app(engine, server_settings(api_keys=KEYS, **settings))
        in_flight, queue = app.state.plait.in_flight, app.state.plait.admission.queue

        async def go():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://host", timeout=60) as client:

                async def post(body, key="a-key", path="/v1/completions"):
                    return await client.post(path, json=body, headers={"x-api-key": key})

                async def beside(num_calls, *bodies, key="a-key"):
                    running = asyncio.create_task(post(LONG | {"n": num_calls}))
                    while queue.num_calls < num_calls and not running.done():
                        await asyncio.sleep(0)
                    answers = [await post(body, key) for body in bodies]
                    running.cancel()
                    await asyncio.wait([running])
                    return answers

                return await work(post, beside)

        answers = asyncio.run(go())
        assert (queue.num_calls, in_flight.num_of_tenant("alice"), len(in_flight.records)) == (0, 0, 0)
        return answers

    return run


def code(response):
    return response.status_code, response.json().get("error", {}).get("code")


@pytest.mark.parametrize(
    ("settings", "whose"), [({"max_requests_per_key": 8}, "one key"), ({"max_running": 6, "max_queue": 2}, "server")]
)
def test_particles_that_exceed_a_limit_alone_are_refused(ask, settings, whose) -> None:
    async def work(post, beside):
        return [await post(DRAWN | how) for how in ({"particles": 9}, {"particles": 3, "n": 3}, {"particles": 8})]

    nine, three_times_three, fits = ask(work, **settings)
    for refused in (nine, three_times_three):
        error = refused.json()["error"]
        assert (*code(refused), error["param"]) == (400, "too_many_calls", "particles")
        assert "9 calls" in error["message"] and whose in error["message"] and error["message"].endswith("can have 8")
    assert fits.status_code == 200, fits.text


def test_particles_count_as_requests_of_their_key(ask) -> None:
    async def work(post, beside):
        own = await beside(1, DRAWN | {"particles": 5}, DRAWN | {"particles": 4}, DRAWN | {"exact": True})
        return own, await beside(1, DRAWN | {"particles": 5}, key="b-key")

    (five, four, exact), (other,) = ask(work, max_requests_per_key=5)
    assert code(five) == (429, "rate_limit_exceeded") and "this request needs 5" in five.json()["error"]["message"]
    assert four.status_code == exact.status_code == other.status_code == 200


def test_rows_count_against_the_capacity(ask) -> None:
    async def work(post, beside):
        return await beside(4, DRAWN | {"particles": 5}, DRAWN | {"exact": True, "n": 2}, DRAWN | {"particles": 4})

    particles, exact, fits = ask(work, max_running=4, max_queue=4)
    assert code(particles) == code(exact) == (503, "queue_full")
    assert "needs 5" in particles.text and f"needs {2 * MAX_SEARCH_ROWS}" in exact.text
    assert fits.status_code == 200, fits.text


def test_the_particles_of_a_program_count(ask) -> None:
    def program(particles, branches=2):
        branch = [{"text": "One"}, {"gen": {"regex": "[a-z]{1,3}", "max_tokens": 4, "particles": particles}}]
        return {"program": [{"text": "a"}, {"fork": {"branches": [branch] * branches}}]}

    async def work(post, beside):
        return [await post(program(count), path="/v1/programs") for count in (5, 4)]

    ten, eight = ask(work, max_requests_per_key=9)
    assert code(ten) == (400, "too_many_calls") and "10 calls" in ten.json()["error"]["message"]
    assert eight.status_code == 200, eight.text
