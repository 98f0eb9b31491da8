"""Requests that a page of another site makes a browser send, with its Host, Origin and Sec-Fetch headers."""

from __future__ import annotations

from collections.abc import Iterator

from common.http import connect, read_all
from faults.figures import Figure, Scale, none_of
from faults.served import Server, serve

EVIL = "http://evil.example"
BODY = b'{"abort_all": true}'
PATHS = [("GET", "/"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/status"), ("GET", "/flush_cache")]
PATHS += [("GET", "/health_generate"), ("POST", "/v1/completions"), ("POST", "/generate"), ("POST", "/abort_request")]
PATHS += [
    ("POST", "/flush_cache"),
    ("POST", "/api/generate"),
    ("OPTIONS", "/v1/completions"),
    ("DELETE", "/api/delete"),
]
TYPES = ["application/json", "text/plain", ""]
FORM = "application/x-www-form-urlencoded"
# clients of SGLang flush, and those of Ollama generate, without a content type or with that of `curl -d`; a browser
# sends an Origin then
UNTYPED = (("/flush_cache", ""), ("/api/generate", ""), ("/api/generate", FORM))
CHANGES = ("/flush_cache", "/health_generate")


def inflict(scale: Scale) -> Iterator[Figure]:
    with serve() as server:
        own = f"localhost:{server.port}"
        rebound = [f"host: evil.example:{server.port}", f"origin: {EVIL}:{server.port}", "sec-fetch-site: same-origin"]
        tricks = {
            "a page by DNS rebinding": [rebound, rebound[:1], rebound[:2], ["host: localhost.evil.example"]],
            "a foreign Origin": [[f"host: {own}", f"origin: {EVIL}"], [f"host: {own}", "origin: null"]]
            + [[f"host: {own}", f"origin: http://localhost:{server.port + 1}", "sec-fetch-site: same-site"]],
            "another site's images, frames and scripts": [
                [f"host: {own}", "sec-fetch-site: cross-site", f"sec-fetch-mode: {mode}"]
                for mode in ("no-cors", "cors")
            ],
        }
        for name, header_sets in tricks.items():
            yield refused(server, name, header_sets)
        yield changing_gets(server, own)
        yield bodies_of_forms(server, own)


def status(server: Server, method: str, path: str, headers: list[str], content_type: str) -> int:
    lines = [f"{method} {path} HTTP/1.1", *headers, "connection: close", f"content-length: {len(BODY)}"]
    lines += [f"content-type: {content_type}"] if content_type else []
    with connect(server.port) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + BODY)
        return int(read_all(connection, 20).split()[1])


def refused(server: Server, name: str, header_sets: list[list[str]]) -> Figure:
    failures, count = [], 0
    for headers in header_sets:
        for method, path in PATHS:
            for content_type in TYPES:
                code = status(server, method, path, headers, content_type)
                count += 1
                if code != 403:
                    failures.append(f"{code} for {method} {path} {headers[1:]}")
    return none_of(name, failures, count, "requests answered")


def changing_gets(server: Server, own: str) -> Figure:
    marks = [
        ["sec-fetch-site: none", "sec-fetch-mode: navigate"],
        [f"origin: http://{own}"],
        ["user-agent: Mozilla/5.0"],
    ]
    failures = [
        f"{path} {mark}"
        for path in CHANGES
        for mark in marks
        if status(server, "GET", path, [f"host: {own}", *mark], "") != 403
    ]
    return none_of("a browser's GET of what changes or computes", failures, len(CHANGES) * len(marks), "answered")


def bodies_of_forms(server: Server, own: str) -> Figure:
    """Without Sec-Fetch headers and Origin: the content type is all that distinguishes a form."""
    types = ["text/plain", "", FORM, "multipart/form-data; boundary=x"]
    posts = [path for method, path in PATHS if method == "POST"]
    codes = {(path, kind): status(server, "POST", path, [f"host: {own}"], kind) for path in posts for kind in types}
    failures = [
        f"{code} for {path} as {kind!r}"
        for (path, kind), code in codes.items()
        if code != 415 and (path, kind) not in UNTYPED
    ]
    marks = [f"referer: http://{own}/", "sec-fetch-site: none", "user-agent: Mozilla/5.0"]
    blobs = {(mark, kind): status(server, "POST", "/api/generate", [f"host: {own}", mark], kind)
             for mark in marks for kind in ("", "application/octet-stream", FORM)}  # fmt: skip
    failures += [f"{code} for a blob with {mark!r} as {kind!r}" for (mark, kind), code in blobs.items() if code != 415]
    codes |= blobs
    return none_of("a form's POST", failures, len(codes), "answered")
