"""Admission: API keys, origins and limits, which are checked before a request's body is read."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from error_bodies import check_error_body
from fastapi.routing import APIRoute

from plait.runtime.server.app import ROUTERS, create_app
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.in_flight import RequestRecord
from plait.runtime.server.settings import server_settings

KEYS = {"alice": digest(b"a-key"), "bob": digest(b"b-key")}
ALICE = {"authorization": "Bearer a-key"}
BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 2}
PATHS = sorted({route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)})


def ask(app, method, path, **options):
    async def go():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await client.request(method, path, **options)

    return asyncio.run(go())


def code_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


@pytest.fixture
def app(engine):
    def make(**settings):
        return create_app(engine, server_settings(**settings))

    return make


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "BREW"])
def test_every_path_but_health_and_ready_needs_a_key(app, method) -> None:
    with_keys = app(api_keys=KEYS)
    for path in [*PATHS, "/openapi.json", "/docs", "/nothing", "/health/", "/ready/x"]:
        response = ask(with_keys, method, path)
        if path in ("/health", "/ready"):
            assert response.status_code in (200, 405), path
        else:
            assert response.status_code == 401 and "key" in check_error_body(path, response.json()), path
            assert response.headers["www-authenticate"] == "Bearer", path


WITHOUT_KEY = [
    {"authorization": "Bearer wrong"},
    {"authorization": "Basic a-key"},
    {"authorization": "a-key"},
    {"authorization": "Bearer"},
    {"x-api-key": "A-KEY"},
    {"host": "host/health?", "authorization": ""},
    {"x-forwarded-prefix": "/health", "x-original-url": "/health"},
]
WITH_KEY = [ALICE, {"authorization": "bearer  a-key "}, {"x-api-key": "b-key"}, {"AUTHORIZATION": "BEARER a-key"}]


@pytest.mark.parametrize(("headers", "status"), [*((h, 401) for h in WITHOUT_KEY), *((h, 200) for h in WITH_KEY)])
def test_headers_with_and_without_a_key(app, headers, status) -> None:
    assert ask(app(api_keys=KEYS), "GET", "/v1/models", headers=headers).status_code == status


def test_the_error_tells_a_wrong_key_from_a_missing_one(app) -> None:
    for headers, text in (
        ({"authorization": "Bearer wrong"}, "the API key is not valid"),
        ({"x-api-key": "wrong"}, "the API key is not valid"),
        ({"authorization": "a-key"}, "an API key is needed: send it as 'Authorization: Bearer KEY'"),
        ({}, "an API key is needed: send it as 'Authorization: Bearer KEY'"),
    ):
        assert ask(app(api_keys=KEYS), "GET", "/v1/models", headers=headers).json()["error"]["message"] == text


def test_settings_open_the_page_and_the_metrics(app) -> None:
    assert ask(app(api_keys=KEYS), "GET", "/").status_code == 200
    for method in ("GET", "HEAD"):  # Claude Code asks for HEAD / first, without a key
        answer = ask(app(api_keys=KEYS, page=False), method, "/")
        assert (answer.status_code, answer.headers["content-length"]) == (200, "17")
        assert ask(app(api_keys=KEYS, page=False), method, "/page/main.js").status_code == 401
    assert answer.text == "" and ask(app(page=False), "GET", "/").text == "plait is running\n"


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/api/tags", "/api/version"])
def test_head_is_answered_as_get_without_the_body(app, path) -> None:
    whole, head = (ask(app(), method, path) for method in ("GET", "HEAD"))
    assert (head.status_code, head.headers["content-type"]) == (200, whole.headers["content-type"])
    assert ask(app(api_keys=KEYS), "GET", "/metrics").status_code == 401
    assert ask(app(api_keys=KEYS, open_metrics=True), "GET", "/metrics").status_code == 200


def test_two_keys_share_no_prefix_cache(app) -> None:
    served = app(api_keys=KEYS)
    body = {**BODY, "prompt": "A prompt that only this test uses, long enough to be found again."}

    def cached(key):
        response = ask(served, "POST", "/v1/completions", json=body, headers={"x-api-key": key})
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("a-key") == 0 and cached("a-key") > 10
    assert cached("b-key") == 0


def ask_asgi(app, headers=(), receive=None, path="/v1/completions", method="POST"):
    """Returns the status, error code and headers of a request. Fails the test if its body is read without `receive`."""
    sent = []

    async def fail_on_read():
        pytest.fail("the body was read")

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [
            (name.encode(), value.encode()) for name, value in [("content-type", "application/json"), *headers]
        ],
        "scheme": "http",
        "server": ("host", 80),
        "client": ("here", 1),
        "http_version": "1.1",
        "root_path": "",
    }
    asyncio.run(app(scope, receive or fail_on_read, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"], dict(sent[0]["headers"])


@pytest.mark.parametrize(
    "path", ["//health", "/health/../metrics", "/HEALTH", "", "/health\x00", "health", "/page/../status"]
)
def test_paths_similar_to_public_ones_need_a_key(app, path) -> None:
    assert ask_asgi(app(api_keys=KEYS), path=path, method="GET")[:2] == (401, "invalid_api_key")


def test_requests_are_refused_before_their_body_is_read(app) -> None:
    assert ask_asgi(app(api_keys=KEYS))[:2] == (401, "invalid_api_key")
    assert ask_asgi(app(max_body_bytes=2048), [("content-length", "2049")])[:2] == (413, "body_too_large")
    full = app(max_queue=1, max_running=1, retry_after_s=7)
    admission, records = full.state.plait.admission, [RequestRecord("POST", "/"), RequestRecord("POST", "/")]
    for record in records:
        admission.admit(record)
        admission.enter_queue(record, admission.queue)
    status, code, headers = ask_asgi(full)
    assert (status, code, headers[b"retry-after"]) == (503, "queue_full", b"7")
    assert ask(full, "GET", "/ready").status_code == 503
    admission.leave_queue(records[0])
    assert ask(full, "GET", "/ready").status_code == 200
    full.state.plait.admission.is_draining = True
    status, code, headers = ask_asgi(full)
    assert (status, code, headers[b"retry-after"]) == (503, "draining", b"7")
    assert ask(full, "GET", "/ready").json()["error"]["code"] == "draining"
    assert ask(full, "GET", "/health").status_code == 200


def test_request_counts_as_its_prompts_times_its_choices(app) -> None:
    served = app(max_running=4, max_queue=2)
    in_flight, queue = served.state.plait.in_flight, served.state.plait.admission.queue

    async def go():
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:

            async def one(path="/v1/completions", **body):
                return await client.post(path, json=body)

            alone = await one(**BODY, n=8)  # exceeds the capacity, but no other request is running
            assert queue.num_calls == 0
            four = asyncio.create_task(
                one(**BODY | {"prompt": ["One", "Two"], "n": 2, "max_tokens": 2000, "ignore_eos": True})
            )
            while queue.num_calls < 4 and not four.done():
                await asyncio.sleep(0)
            assert queue.num_calls == 4
            branches = [{"text": "a"}, {"fork": {"branches": [[{"gen": {}}, {"text": "b"}, {"gen": {"n": 2}}]] * 2}}]
            refused = [await one(**BODY, n=3), await one("/v1/programs", program=branches)]
            fits = await one(**BODY, n=2)
            assert queue.num_calls == 4
            four.cancel()
            return alone, refused, fits

    alone, refused, fits = asyncio.run(go())
    assert alone.status_code == fits.status_code == 200
    for response in refused:
        assert (
            response.status_code == 503 and code_of(response) == "queue_full" and response.headers["retry-after"] == "1"
        )
    assert queue.num_calls == in_flight.num_admitted == 0


def test_key_has_a_limit_of_running_requests(app) -> None:
    served = app(api_keys=KEYS, max_requests_per_key=1)

    async def go():
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:

            async def one(key):
                return await client.post("/v1/completions", json={**BODY, "max_tokens": 8}, headers={"x-api-key": key})

            first, second, other = await asyncio.gather(one("a-key"), one("a-key"), one("b-key"))
            third = await one("a-key")
            return first, second, other, third

    first, second, other, third = asyncio.run(go())
    assert [response.status_code for response in (first, second, other, third)] == [200, 429, 200, 200]
    assert code_of(second) == "rate_limit_exceeded" and second.headers["retry-after"] == "1"
    in_flight = served.state.plait.in_flight
    assert in_flight.num_admitted == in_flight.num_of_tenant("alice") == len(in_flight.records) == 0


def test_slow_body_times_out(app) -> None:
    async def receive_slowly():
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    assert ask_asgi(app(body_timeout_s=0.2), receive=receive_slowly)[:2] == (408, "body_timeout")


def test_large_body_without_a_content_length_is_refused(app) -> None:
    async def receive_endlessly():
        return {"type": "http.request", "body": b"x" * 600, "more_body": True}

    assert ask_asgi(app(max_body_bytes=2048), receive=receive_endlessly)[:2] == (413, "body_too_large")


def test_browser_requests_of_other_origins_are_refused(app) -> None:
    """Even simple requests, which browsers send without a preflight."""
    foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    response = ask(app(), "POST", "/v1/completions", json=BODY, headers=foreign)
    assert response.status_code == 403 and code_of(response) == "cross_origin"
    assert "access-control-allow-origin" not in response.headers
    own = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
    assert ask(app(), "POST", "/v1/completions", json=BODY, headers=own).status_code == 200
    allowed = app(cors_origins=["https://good.example"], api_keys=KEYS)
    assert ask(allowed, "POST", "/v1/completions", json=BODY, headers={**foreign, **ALICE}).status_code == 403
    good = {"origin": "https://good.example", "sec-fetch-site": "cross-site"}
    preflight_headers = {
        **good,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    preflight = ask(allowed, "OPTIONS", "/v1/completions", headers=preflight_headers)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "https://good.example"
    response = ask(allowed, "POST", "/v1/completions", json=BODY, headers={**good, **ALICE})
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-credentials" not in response.headers


def test_request_ids_are_made_by_the_server(app) -> None:
    response = ask(app(), "GET", "/v1/models", headers={"x-request-id": "theirs"})
    assert response.headers["x-request-id"].startswith("req-")
    refused = ask(app(api_keys=KEYS), "GET", "/v1/models")
    assert refused.headers["x-request-id"] != response.headers["x-request-id"]
