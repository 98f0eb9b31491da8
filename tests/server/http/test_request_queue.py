"""The queue of a server with the embedded model: shares of keys, Retry-After, flushing, and what is counted."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from plait.runtime.errors import InputError
from plait.runtime.server.app import create_app
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.settings import server_settings
from plait.serve import _key_weights

KEYS = {"flood": digest(b"f-key"), "victim": digest(b"v-key")}
BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 2}


@pytest.fixture
def served(engine):
    def make(**settings):
        return create_app(engine, server_settings(**{"api_keys": KEYS} | settings))

    return make


def run(app, work):
    """Runs `work(ask)`, where `ask(key, path, **body)` posts a request, and checks that nothing stays counted."""

    async def go():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:

            async def ask(key, path="/v1/completions", **body):
                return await client.post(path, json=BODY | body, headers={"x-api-key": key})

            return await work(ask)

    answer = asyncio.run(go())
    queue = app.state.plait.admission.queue
    assert (queue.control.num_calls, queue.control.num_waiting, queue._requests, queue._waiting) == (0, 0, {}, {})
    assert not (queue.control.calls or queue.control.waiting_calls or queue.control.waiting_tokens)
    assert queue.queue_time_s() == 0
    return answer


def code_of(response):
    return response.json()["error"]["code"]


@pytest.mark.parametrize("settings", [{}, {"max_queue": 32}, {"max_queue_time_s": 0, "max_queue": 100}])
def test_800_requests_of_one_key_refuse_none_of_another(served, settings) -> None:
    async def work(ask):
        flood = [asyncio.create_task(ask("f-key", max_tokens=4)) for _ in range(800)]
        victims = []
        while not all(task.done() for task in flood):
            victims.append(await ask("v-key"))
        victims += await asyncio.gather(*(ask("v-key") for _ in range(2)))
        return await asyncio.gather(*flood), victims

    flood, victims = run(served(**settings), work)
    assert {response.status_code for response in victims} == {200} and len(victims) > 2
    refused = [response for response in flood if response.status_code != 200]
    assert refused and len(refused) < 800
    for response in refused:
        expected = {503: "queue_full", 429: "rate_limit_exceeded"}
        assert code_of(response) == expected[response.status_code]
        assert 1 <= int(response.headers["retry-after"]) <= 60


def test_without_a_queue_time_only_the_number_of_calls_is_limited(served) -> None:
    app = served(api_keys={}, max_queue_time_s=0)

    async def work(ask):
        return await asyncio.gather(*(ask("", max_tokens=4) for _ in range(200)))

    assert {response.status_code for response in run(app, work)} == {200}


def test_first_tokens_are_found_and_the_rate_is_measured(served) -> None:
    app = served()
    queue = app.state.plait.admission.queue

    async def work(ask):
        async def watch():
            while True:
                assert queue.queue_time_s() >= 0
                control = queue.control
                assert 0 <= control.num_waiting <= control.num_calls <= 20
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        responses = await asyncio.gather(*(ask("f-key", max_tokens=8) for _ in range(20)))
        assert not watching.done()
        watching.cancel()
        return responses

    assert {response.status_code for response in run(app, work)} == {200}
    assert queue.control.tokens_per_s(0.0) > 0


def test_predicted_time_is_a_metric(served) -> None:
    app = served(api_keys={}, open_metrics=True)

    async def work(ask):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return (await client.get("/metrics")).text

    assert "\nplait_predicted_queue_seconds 0" in run(app, work)


def test_a_flush_drops_the_cache_of_its_own_key(served) -> None:
    prompt = "A prompt that only the test of flushing uses, long enough to be found again in the cache."

    async def work(ask):
        async def cached(key):
            answer = (await ask(key, prompt=prompt)).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        before = [await cached(key) for key in ("f-key", "v-key", "f-key", "v-key")]
        assert (await ask("f-key", "/flush_cache")).status_code == 200
        return before, [await cached("f-key"), await cached("v-key")]

    before, after = run(served(), work)
    assert before[:2] == [0, 0] and min(before[2:]) > 10
    assert after[0] == 0 and after[1] > 10


@pytest.mark.parametrize(
    ("options", "text"),
    [(["eve=2"], "names no API key"), (["flood"], "names no API key"), (["flood=x"], "has no number")],
)
def test_wrong_weights_are_refused(options, text) -> None:
    with pytest.raises(InputError, match=text):
        _key_weights(options, KEYS)


def test_weights_of_keys_divide_the_capacity(served) -> None:
    assert _key_weights(["flood=3", "victim=0.5"], KEYS) == {"flood": 3.0, "victim": 0.5}
    app = served(key_weights={"flood": 3.0}, max_running=4, max_queue=4, max_queue_time_s=0)
    control = app.state.plait.admission.queue.control
    requests = []
    for key, most in (("flood", 8), ("victim", 2), ("flood", 0)):
        num_admitted = 0
        while control.refusal(key, 0.0) is None:
            requests.append(control.admit(key, 0.0))
            num_admitted += 1
        assert num_admitted == most
    for request in requests:
        control.end(request, 0.0)
