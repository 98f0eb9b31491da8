"""A body with two lengths is not read as a second request (smuggling), and no path leads out of the page's folder."""

from __future__ import annotations

import re
import socket

import pytest

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
AMBIGUOUS = [
    b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
    b"content-length: 4\r\ncontent-length: 5\r\n",
    b"content-length: +4\r\n",
    b"content-length: 0x4\r\n",
    b"content-length: -1\r\n",
    b"content-length: 4,4\r\n",
    b"transfer-encoding: identity, chunked\r\ncontent-length: 4\r\n",
    b"transfer-encoding: xchunked\r\ncontent-length: 4\r\n",
    b"transfer-encoding : chunked\r\ncontent-length: 4\r\n",
    b"transfer-encoding:\x0bchunked\r\ncontent-length: 4\r\n",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
]
PATHS = ["/../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page/../../x.py"]
PATHS += ["/app.js/../../app.py", "/.%00/etc/passwd", "/..\\..\\etc\\passwd", "/static/%252e%252e/etc/passwd"]


def answers(address: str, content: bytes) -> list[int]:
    """The statuses of all answers to `content` until the server closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(content)
        while part := connection.recv(65536):
            received += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)]


@pytest.mark.parametrize("headers", AMBIGUOUS)
def test_no_part_of_a_body_is_answered(serve, headers) -> None:
    address, _ = serve(idle_timeout_s=0.3)
    found = answers(address, b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n0\r\n\r\n" + SMUGGLED)
    assert len(found) <= 1 and 404 not in found


def test_a_second_request_behind_a_body_of_one_length_is_answered(serve) -> None:
    address, _ = serve(idle_timeout_s=0.3)
    first = b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\r\nbody"
    assert answers(address, first + SMUGGLED) == [200, 404]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_out_of_the_folder_is_not_found(serve, path) -> None:
    address, _ = serve(idle_timeout_s=0.3)
    (status,) = answers(address, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    assert 400 <= status < 500
