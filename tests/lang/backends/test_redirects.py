"""A service that redirects: neither the key nor the text goes to another host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from plait.lang.backends.http_client import JsonHttp
from plait.runtime.errors import CallFailed


@contextlib.contextmanager
def answering(status: int, location: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server that answers every request alike. Yields its address and the Authorization headers that it got."""
    received: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(self.headers.get("authorization", ""))
            self.send_response(status)
            self.send_header("location", location)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()


REQUESTS: dict[str, Callable[[JsonHttp], object]] = {
    "get": lambda http: http.get("/models"),
    "post": lambda http: http.post("/chat", {"a": 1}, timeout_s=30),
    "events": lambda http: list(http.events("/chat", {"a": 1}, timeout_s=30)),
}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_a_redirect_is_not_followed(status: int, request_: Callable[[JsonHttp], object]) -> None:
    with (
        answering(200) as (elsewhere, received),
        answering(status, f"{elsewhere}/x") as (address, first),
        pytest.raises(CallFailed, match="redirect"),
    ):
        request_(JsonHttp(address, {"authorization": "Bearer a-key"}))
    assert (first, received) == (["Bearer a-key"], [])
