"""Requests that wait for their turn, on a server with the embedded model: nobody is lost, and each wait has its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi.routing import APIRoute
from waiting import wait_until

from plait.runtime.errors import InputError
from plait.runtime.server import app_state
from plait.runtime.server.app import ROUTERS, create_app
from plait.runtime.server.errors import ApiError
from plait.runtime.server.http import response as response_module
from plait.runtime.server.http.admission import AdmissionControl
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.in_flight import InFlightRequests
from plait.runtime.server.settings import server_settings
from plait.serve import _key_weights

KEYS = {"flood": digest(b"f-key"), "victim": digest(b"v-key")}
BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 2}
LONG = {"max_tokens": 2000, "ignore_eos": True}
MESSAGES = {"messages": [{"role": "user", "content": "One, two,"}]}
GENERATE = {"text": "One, two,", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
STREAMS = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"model": "default", "max_tokens": 2, **MESSAGES},
    "/v1/messages": {"model": "default", "max_tokens": 2, **MESSAGES},
    "/v1/responses": {"model": "default", "input": "One, two,", "max_output_tokens": 2},
    "/generate": {"text": "One, two,", "sampling_params": {"max_new_tokens": 2}},
    "/v1/programs": {"program": [{"text": "One, two,"}, {"gen": {"name": "x", "max_tokens": 2}}]},
}


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
                body = BODY | body if path == "/v1/completions" else body
                return await client.post(path, json=body, headers={"x-api-key": key})

            return await work(ask)

    answer = asyncio.run(go())
    admission = app.state.plait.admission
    queue = admission.queue
    assert (queue.num_calls, queue.num_rows, queue.num_waiting) == (0, 0, 0)
    assert not (queue._places.holders() or queue._turns.holders() or admission.body_bytes.holders())
    return answer


def code_of(response):
    return response.json()["error"]["code"]


def test_by_default_no_request_is_refused(served) -> None:
    """200 calls at once, three times the rows."""

    async def work(ask):
        return await asyncio.gather(*(ask("f-key", max_tokens=4) for _ in range(200)))

    assert {response.status_code for response in run(served(), work)} == {200}


@pytest.mark.parametrize("settings", [{}, {"max_queue": 32}])
def test_many_requests_of_one_key_refuse_none_of_another(served, settings) -> None:
    async def work(ask):
        flood = [asyncio.create_task(ask("f-key", max_tokens=4)) for _ in range(200)]
        victims = []
        while not all(task.done() for task in flood):
            victims.append(await ask("v-key"))
        victims += await asyncio.gather(*(ask("v-key") for _ in range(2)))
        return await asyncio.gather(*flood), victims

    flood, victims = run(served(**settings), work)
    assert {response.status_code for response in victims} == {200} and len(victims) > 2
    refused = [response for response in flood if response.status_code != 200]
    assert bool(refused) == ("max_queue" in settings)
    for response in refused:
        expected = {503: "queue_full", 429: "rate_limit_exceeded"}
        assert code_of(response) == expected[response.status_code]
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "settings", [{"max_running": 1, "max_queue": 1}, {"max_requests_per_key": 2}], ids=lambda settings: [*settings][-1]
)
def test_a_full_queue_refuses_only_what_runs_calls(served, settings) -> None:
    paths = [
        route.path
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    ]
    app = served(**settings)

    async def work(ask):
        flood = [asyncio.create_task(ask("f-key", "/generate", rid=f"r{i}", **GENERATE)) for i in range(2)]
        while app.state.plait.admission.queue.num_calls < 2:
            await asyncio.sleep(0.001)
        answers = {path: await ask("f-key", path, **MESSAGES) for path in paths if path != "/abort_request"}
        answers["/abort_request"] = await ask("f-key", "/abort_request", abort_all=True)
        await asyncio.gather(*flood)
        return answers

    answers = run(app, work)
    refused = {path for path, response in answers.items() if response.status_code in (429, 503)}
    assert refused == {*STREAMS, "/v1/embeddings", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"}
    assert answers["/abort_request"].status_code == 200


def test_small_bodies_that_run_no_call_are_taken_however_many_bytes_wait() -> None:
    admission = AdmissionControl(server_settings(max_queue_bytes=1024), InFlightRequests())
    admission.body_bytes.take("", 1024)
    for needs_place, num_bytes in ((True, 10), (False, 1 << 17)):
        with pytest.raises(ApiError, match="bodies of waiting requests"):
            admission.check_capacity("", num_bytes, needs_place)
    admission.check_capacity("", 10, needs_place=False)


def test_what_runs_no_call_is_limited_by_itself(served, monkeypatch) -> None:
    monkeypatch.setattr("plait.runtime.server.http.admission.MAX_WITHOUT_PLACE", 4)
    app = served()
    shares = app.state.plait.admission.without_place
    shares.take("flood", 4)

    async def work(ask):
        return [await ask(key, "/tokenize", prompt="hi") for key in ("f-key", "v-key")]

    flood, victim = run(app, work)
    assert (flood.status_code, code_of(flood)) == (503, "queue_full") and victim.status_code == 200
    assert [shares.held(key) for key in KEYS] == [4, 0]


def test_with_a_queue_time_what_has_not_begun_is_refused_then(served) -> None:
    async def work(ask):
        async def timed(**body):
            start = time.monotonic()
            return await ask("", **body), time.monotonic() - start

        running = asyncio.create_task(timed(**LONG))
        while not app.state.plait.admission.queue.num_rows:
            await asyncio.sleep(0.001)
        (waited, seconds), *_ = await asyncio.gather(*(timed() for _ in range(5)))
        running.cancel()
        return waited, seconds

    app = served(api_keys={}, max_running=1, max_queue_time_s=0.2)
    response, seconds = run(app, work)
    assert (response.status_code, code_of(response)) == (503, "queue_full") and "0.2 s" in response.text
    assert seconds >= 0.2


def test_a_request_that_waits_ends_with_its_own_timeout(served) -> None:
    async def work(ask):
        running = [asyncio.create_task(ask("", **LONG)) for _ in range(2)]
        while app.state.plait.admission.queue.num_rows < 2:
            await asyncio.sleep(0.001)
        response = await ask("", timeout=0.1)
        for task in running:
            task.cancel()
        return response

    app = served(api_keys={}, max_running=1)
    response = run(app, work)
    assert (response.status_code, code_of(response)) == (503, "queue_timeout")
    assert response.json()["error"]["param"] == "timeout"


def test_bodies_that_wait_are_bounded_in_bytes(served) -> None:
    """Each key has its share of the bytes, and a body that has not arrived counts for nothing."""

    async def work(ask):
        running = [asyncio.create_task(ask("f-key", **LONG)) for _ in range(2)]
        while app.state.plait.admission.queue.num_rows < 2:
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(ask("f-key", user="x" * 3000)) for _ in range(2)]
        while app.state.plait.admission.queue.num_waiting < 2:
            await asyncio.sleep(0.001)
        refused, other = await ask("f-key", user="x" * 3000), await ask("v-key", user="x" * 1000)
        for task in running:
            task.cancel()
        return refused, other, await asyncio.gather(*waiting)

    app = served(max_running=1, max_queue_bytes=8000)
    refused, other, waited = run(app, work)
    assert refused.status_code in (429, 503) and "8000 bytes" in refused.text
    assert [response.status_code for response in (other, *waited)] == [200, 200, 200]


@pytest.mark.parametrize("keys", [{}, KEYS])
def test_a_body_above_the_limit_of_waiting_bodies_is_taken_alone(served, keys) -> None:
    """It would be refused for ever otherwise. Beside other bodies it is not taken."""

    async def work(ask):
        alone = await ask("f-key", user="x" * 3000)
        running = [asyncio.create_task(ask("f-key", **LONG)) for _ in range(2)]
        while app.state.plait.admission.queue.num_rows < 2:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(ask("f-key", user="x" * 1000))
        while not app.state.plait.admission.queue.num_waiting:
            await asyncio.sleep(0.001)
        beside = await ask("f-key", user="x" * 3000)
        for task in running:
            task.cancel()
        return alone, beside, await waiting

    app = served(api_keys=keys, max_running=1, max_queue_bytes=2000)
    alone, beside, waited = run(app, work)
    assert [response.status_code for response in (alone, beside, waited)] == [200, 503, 200]
    assert code_of(beside) == "queue_full"


def test_a_body_that_never_arrives_holds_no_place(serve) -> None:
    address, state = serve(max_running=1, max_queue=0, max_body_bytes=4096)
    host, port = address.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        while state.in_flight.num_admitted < 20:
            time.sleep(0.01)
        assert httpx.post(f"{address}/v1/completions", json=BODY, timeout=60).status_code == 200
        assert httpx.get(f"{address}/ready").status_code == 200


def test_a_client_that_leaves_while_it_waits_leaves_the_queue(serve, engine) -> None:
    address, state = serve(max_running=1)
    queue = state.admission.queue
    with httpx.Client(base_url=address, timeout=60) as client, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(client.stream("POST", "/v1/completions", json=BODY | LONG | {"stream": True}))
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/completions", json=BODY | {"stream": stream}, timeout=0.3)
        end = time.monotonic() + 30
        while queue.num_waiting and time.monotonic() < end:
            time.sleep(0.01)
        assert (queue.num_waiting, queue.num_calls) == (0, 2)


@pytest.fixture
def full(serve, monkeypatch):
    """A server on which every further request waits. Yields its client, its state, and a function that makes room."""
    for module in (response_module, app_state):
        monkeypatch.setattr(module, "KEEP_ALIVE_INTERVAL_S", 0.05)
    address, state = serve(max_running=1, api_keys={})
    with httpx.Client(base_url=address, timeout=60) as client, contextlib.ExitStack() as running:
        for _ in range(2):
            running.enter_context(client.stream("POST", "/v1/completions", json=BODY | LONG | {"stream": True}))
        yield client, state, running.close


def keep_alive(path: str) -> list[str]:
    """The lines that a stream sends while it waits: a comment, and in Anthropic's protocol its event for this."""
    return ["event: ping", 'data: {"type":"ping"}', ""] if path == "/v1/messages" else [": waiting", ""]


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_sends_comments_and_then_its_events(full, path) -> None:
    client, _, make_room = full
    with client.stream("POST", path, json=STREAMS[path] | {"stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        expected = keep_alive(path) * 2
        assert [next(lines) for _ in expected] == expected
        make_room()
        events = [line for line in lines if line.startswith("data: ")]
    assert len(events) > 1 and not any('"error":{' in event for event in events)


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_fails_while_it_waits_ends_with_an_error(full, path) -> None:
    """Its status has been sent. The server shuts down, and the request has waited until the end of the drain."""
    client, state, _ = full
    with client.stream("POST", path, json=STREAMS[path] | {"stream": True}) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in keep_alive(path)] == keep_alive(path)
        places = [(record, record.place) for record in state.in_flight.records]
        (record,) = [record for record, place in places if place is not None and place.waiter is not None]
        record.task.get_loop().call_soon_threadsafe(record.abort)
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {") and line not in keep_alive(path)]
    assert len(data) == 1 and "shutting down" in json.dumps(data[0])


def test_a_refusal_after_a_comment_is_counted_and_logged_as_any(serve, monkeypatch, caplog) -> None:
    for module in (response_module, app_state):
        monkeypatch.setattr(module, "KEEP_ALIVE_INTERVAL_S", 0.05)
    address, _ = serve(max_running=1, max_queue_time_s=0.3)
    with httpx.Client(base_url=address, timeout=60) as client, caplog.at_level("INFO", "plait.requests"):
        with client.stream("POST", "/v1/completions", json=BODY | LONG | {"stream": True}):
            answer = client.post("/v1/completions", json=BODY | {"stream": True})
        assert answer.text.startswith(": waiting") and '"queue_full"' in answer.text
        assert 'plait_rejections_total{reason="queue_full"} 1\n' in client.get("/metrics").text
    assert "queue_full" in [record.fields.get("error") for record in caplog.records if hasattr(record, "fields")]


def test_lines_of_json_have_no_comments(full) -> None:
    """Ollama's streams: no line stands for nothing there."""
    client, _, make_room = full
    with pytest.raises(httpx.ReadTimeout):
        client.post("/api/generate", json={"model": "default", "prompt": "One"}, timeout=0.3)
    make_room()
    answer = client.post("/api/generate", json={"model": "default", "prompt": "One", "options": {"num_predict": 2}})
    assert answer.status_code == 200 and all(json.loads(line) for line in answer.text.splitlines())


def test_a_request_that_waits_can_be_aborted_by_its_rid(full) -> None:
    client, state, _ = full
    body = STREAMS["/generate"] | {"rid": "mine", "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == ": waiting"
        assert client.post("/abort_request", json={"rid": "other"}).json() == {"aborted": 0}
        assert client.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert data[-1]["error"]["code"] == "aborted" and state.admission.queue.num_waiting == 0


def test_one_of_several_prompts_that_wait_can_be_aborted(full) -> None:
    """Its call is aborted when it begins, and may have a token by then."""
    client, state, make_room = full
    sampling = [{"max_new_tokens": count, "ignore_eos": True} for count in (4000, 5)]
    body = {"text": ["One, two,", "Three, four,"], "rid": ["first", "second"], "sampling_params": sampling}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, "/generate", json=body)
        assert wait_until(lambda: state.admission.queue.num_waiting == 1)
        assert client.post("/abort_request", json={"rid": "first"}).json() == {"aborted": 1}
        make_room()
        first, second = answer.result().json()
    assert first["meta_info"]["finish_reason"]["type"] == "abort" and first["meta_info"]["completion_tokens"] < 4000
    assert second["meta_info"]["finish_reason"]["type"] == "length"


def test_the_number_of_waiting_requests_is_a_metric(full) -> None:
    client, _, _ = full
    with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == ": waiting"
        text = client.get("/metrics").text
        assert "\nplait_requests_waiting 1\n" in text and "vllm:num_requests_waiting{" in text
    assert client.get("/ready").status_code == 200


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
