"""Requests over plain sockets to a server: for many clients at once, and slow, rude or faulty ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from typing import Any

LONG = {"model": "default", "prompt": "One, two,", "max_tokens": 4000, "ignore_eos": True, "stream": True}
STREAM_END = b"\r\n0\r\n\r\n"


def connect(port: int, receive_buffer: int = 0, timeout_s: float = 20) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(timeout_s)
    connection.connect(("127.0.0.1", port))
    return connection


def head(path: str, length: int | None, key: str = "", method: str = "POST", closes: bool = False) -> bytes:
    """The head of a JSON request; without a length its body is chunked.

    `closes`: the connection ends with the answer.
    """
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += ["connection: close"] if closes else []
    lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def request(path: str, body: dict[str, Any], key: str = "", closes: bool = False) -> bytes:
    content = json.dumps(body).encode()
    return head(path, len(content), key, closes=closes) + content


async def send(port: int, content: bytes, host: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request on a connection of its own."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(content)
    return reader, writer


async def ask(port: int, content: bytes) -> tuple[int, dict[str, Any]]:
    """Sends a request whose connection ends with the answer. Returns the status and the JSON of the answer."""
    reader, writer = await send(port, content)
    answer_head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(answer_head.split()[1]), json.loads(answer)


def open_stream(port: int, body: dict[str, Any], key: str = "", receive_buffer: int = 0) -> tuple[socket.socket, bytes]:
    """Sends a request and reads its first event. Returns the connection and what arrived."""
    connection = connect(port, receive_buffer, 60)
    connection.sendall(request("/v1/completions", body, key))
    received = b""
    while b"data: " not in received:
        part = connection.recv(4096)
        if not part:
            break
        received += part
    return connection, received


def reset(connection: socket.socket) -> None:
    """Closes a connection as a process that is killed does: with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()


def read_all(connection: socket.socket, deadline_s: float = 60, until: bytes = b"") -> bytes:
    """Everything that arrives until `until`, the end of the server's side, or the deadline."""
    received, end = b"", time.monotonic() + deadline_s
    while (left := end - time.monotonic()) > 0 and not (until and received.endswith(until)):
        connection.settimeout(left)
        try:
            part = connection.recv(65536)
        except (TimeoutError, ConnectionResetError):
            break
        if not part:
            break
        received += part
    return received


def last_error(stream: bytes) -> str:
    """The code of the error event that ends a chunked stream; "" if there is none."""
    events = [line for line in stream.split(b"\n") if line.startswith(b"data: {")]
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        return str(json.loads(events[-1].removeprefix(b"data: "))["error"]["code"])
    return ""


def send_until_closed(connection: socket.socket, block: bytes, max_bytes: int, stall_s: float) -> int:
    """Sends until `max_bytes`, the end of the connection, or `stall_s` in which the server takes none."""
    connection.settimeout(stall_s)
    num_sent = 0
    try:
        while num_sent < max_bytes:
            num_sent += connection.send(block)
    except OSError:  # a timeout, or the end of the connection
        pass
    return num_sent
