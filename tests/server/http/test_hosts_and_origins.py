"""Requests that a page of another site makes a browser send: their Host, Origin and Sec-Fetch headers."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from plait.cli import main
from plait.runtime.server.app import create_app
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.settings import server_settings

BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 2}
KEY = {"authorization": "Bearer a-key"}
EVIL = "https://evil.example"


@pytest.fixture
def ask(engine):
    """`ask(method, path, headers, **settings)` returns (status, error code) of a request to a new application."""

    def send(method, path, headers=(), content=None, **settings):
        app = create_app(engine, server_settings(**settings))

        async def go():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost:30000", timeout=60) as client:
                client.headers.clear()
                return await client.request(method, path, headers=list(headers), content=content)

        response = asyncio.run(go())
        is_json = response.headers.get("content-type") == "application/json"
        error = response.json()["error"] if response.status_code >= 400 and is_json else {}
        return response.status_code, error.get("code", "") if isinstance(error, dict) else ""

    return send


ALLOWED_HOSTS = [
    *("localhost", "LOCALHOST:30000", "localhost.:1", "chat.localhost", "127.0.0.1:30000", "127.9.9.9", "[::1]:30000"),
    *("10.1.2.3", "[fd00::1]:30000", "gpu-box:30000", "api.example", "API.example:443"),
]
REFUSED_HOSTS = [
    "evil.example",
    "evil.example:30000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    "[",
    "a:b",
]


@pytest.mark.parametrize("host", ALLOWED_HOSTS)
def test_addresses_loopback_names_and_given_names_are_allowed(ask, host) -> None:
    settings = {"host": "gpu-box", "allowed_hosts": ["api.example"]}
    assert ask("GET", "/v1/models", [("host", host)], **settings) == (200, "")


@pytest.mark.parametrize("host", REFUSED_HOSTS)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/metrics", "/openapi.json", "/nothing"])
def test_other_hosts_are_refused(ask, host, path) -> None:
    assert ask("GET", path, [("host", host)]) == (403, "host_not_allowed")


def test_every_host_header_counts(ask) -> None:
    hosts = [("host", "localhost"), ("host", "evil.example")]
    assert ask("GET", "/v1/models", hosts) == ask("GET", "/v1/models", hosts[::-1]) == (403, "host_not_allowed")


def test_a_page_by_dns_rebinding_is_refused(ask) -> None:
    """For a browser it has the same origin as the server."""
    rebound = [
        ("host", "evil.example:30000"),
        ("origin", "http://evil.example:30000"),
        ("sec-fetch-site", "same-origin"),
    ]
    assert ask("POST", "/v1/completions", rebound) == (403, "host_not_allowed")


def test_probes_keys_and_an_asterisk_pass_under_any_host(ask) -> None:
    other = ("host", "plait.default.svc")
    keys = {"alice": digest(b"a-key")}
    assert ask("GET", "/health", [other])[0] == ask("GET", "/ready", [other])[0] == 200
    assert ask("GET", "/v1/models", [other, *KEY.items()], api_keys=keys) == (200, "")
    assert ask("GET", "/metrics", [other], api_keys=keys, open_metrics=True) == (403, "host_not_allowed")
    assert ask("GET", "/v1/models", [other], allowed_hosts=["*"]) == (200, "")


OWN_ORIGINS = [
    ("http://localhost:30000", "localhost:30000"),
    ("http://LOCALHOST:30000", "localhost:30000"),
    ("https://api.example", "api.example"),
    ("http://localhost", "localhost:80"),
    ("http://[::1]:30000", "[::1]:30000"),
]
OTHER_ORIGINS = [
    *(EVIL, "null", "http://localhost", "http://localhost:3000", "https://localhost.evil.example:30000"),
    *("http://127.0.0.1:30000", "file://localhost:30000", "localhost:30000", "http://localhost:30000x", ""),
]


@pytest.mark.parametrize(("origin", "host"), OWN_ORIGINS)
def test_the_own_origin_is_allowed(ask, origin, host) -> None:
    assert ask("GET", "/v1/models", [("host", host), ("origin", origin)], allowed_hosts=["api.example"]) == (200, "")


@pytest.mark.parametrize("origin", OTHER_ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_an_origin_is_checked_wherever_it_stands(ask, origin, method) -> None:
    for more in ([], [("sec-fetch-site", "same-origin")], [("sec-fetch-site", "cross-site")]):
        assert ask(method, "/v1/models", [("host", "localhost:30000"), ("origin", origin), *more]) == (
            403,
            "cross_origin",
        )


def test_allowed_origins_pass(ask) -> None:
    evil = [("host", "localhost"), ("origin", EVIL), ("sec-fetch-site", "cross-site")]
    assert ask("GET", "/v1/models", evil, cors_origins=[EVIL]) == (200, "")
    assert ask("GET", "/v1/models", evil, cors_origins=["*"]) == (200, "")
    assert ask("GET", "/v1/models", evil, cors_origins=["https://good.example"]) == (403, "cross_origin")


def test_another_site_may_link_here_and_load_nothing(ask) -> None:
    cross = [("host", "localhost"), ("sec-fetch-site", "cross-site")]
    link, image = [*cross, ("sec-fetch-mode", "navigate")], [*cross, ("sec-fetch-mode", "no-cors")]
    assert ask("GET", "/", link)[0] == ask("GET", "/v1/models", link)[0] == 200
    for path in ("/", "/v1/models", "/metrics", "/flush_cache", "/health_generate"):
        assert ask("GET", path, image) == (403, "cross_origin")
    assert ask("POST", "/flush_cache", link) == (403, "cross_origin")


BROWSERS = [
    [("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")],
    [("sec-fetch-site", "same-origin")],
    [("origin", "http://localhost:30000")],
    [("user-agent", "Mozilla/5.0 (X11; Linux x86_64)")],  # to http://10.1.2.3 browsers send no Sec-Fetch headers
]


@pytest.mark.parametrize("headers", BROWSERS)
def test_a_get_that_changes_or_computes_is_not_for_browsers(ask, headers) -> None:
    for path in ("/flush_cache", "/health_generate"):
        assert ask("GET", path, [("host", "localhost:30000"), *headers]) == (403, "cross_origin")


def test_clients_of_sglang_flush_the_cache(ask) -> None:
    host = [("host", "localhost"), ("user-agent", "python-requests/2.34.2")]
    json = ("content-type", "application/json; charset=utf-8")
    assert ask("GET", "/flush_cache", host)[0] == ask("GET", "/health_generate", host)[0] == 200
    assert ask("POST", "/flush_cache", host)[0] == ask("POST", "/flush_cache", [*host, json])[0] == 200
    form = ("content-type", "text/plain")
    assert ask("POST", "/flush_cache", [*host, form], b"x=1") == (415, "unsupported_media_type")


@pytest.mark.parametrize("path", ["/abort_request", "/v1/completions", "/generate", "/tokenize"])
def test_a_body_needs_a_json_content_type(ask, path) -> None:
    body = b'{"abort_all": true}'
    assert ask("POST", path, [("host", "localhost")], body) == (415, "unsupported_media_type")
    evil = [("host", "localhost"), ("origin", EVIL), ("content-type", "application/json")]
    assert ask("POST", path, evil, body) == (403, "cross_origin")


UNTYPED = [None, "application/octet-stream", "application/x-www-form-urlencoded"]


@pytest.mark.parametrize("untyped", UNTYPED, ids=["none", "octet-stream", "form"])
def test_clients_of_ollama_need_no_content_type(ask, untyped) -> None:
    """Such as litellm, and `curl -d`; a page can send an untyped blob, or a form, without asking first."""
    host = ("host", "localhost:30000")
    client = [host, ("user-agent", "litellm/1.108.7"), *([("content-type", untyped)] if untyped else [])]
    bodies = {
        "/api/generate": b'{"model": "default", "prompt": "hi", "options": {"num_predict": 1}}',
        "/api/chat": b'{"model": "default", "messages": [{"role": "user", "content": "hi"}], '
        b'"options": {"num_predict": 1}}',
        "/api/embed": b'{"model": "default", "input": []}',
        "/api/embeddings": b'{"model": "default", "prompt": ""}',
        "/api/show": b'{"model": "default"}',
    }
    for path, body in bodies.items():
        assert ask("POST", path, client, body)[0] in (200, 400), path  # 400: the model has no embeddings
        page = [("origin", "http://localhost:30000"), ("referer", "http://localhost:30000/")]
        for header in (*page, ("sec-fetch-site", "same-origin"), ("sec-fetch-mode", "no-cors")):
            assert ask("POST", path, [*client, header], body)[0] == 415, (path, header)
        for form in ("text/plain", "multipart/form-data; boundary=x"):
            assert ask("POST", path, [host, ("content-type", form)], body)[0] == 415, (path, form)
        assert ask("POST", path, [*client, ("origin", EVIL)], body)[0] == 403
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate", "/abort_request"):
        assert ask("POST", path, client, b'{"model": "default"}')[0] == 415, path


def test_a_wrong_allowed_host_is_refused(capsys) -> None:
    assert main(["serve", "--allowed-host", "http://api.example"]) == 1
    assert "--allowed-host must be" in capsys.readouterr().err
