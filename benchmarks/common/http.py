"""Requests over plain sockets to a server: for many clients at once, and rude ones."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

LONG = {"model": "default", "prompt": "One, two,", "max_tokens": 4000, "ignore_eos": True, "stream": True}


def connect(port: int, receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    return connection


def head(path: str, length: int, key: str = "", closes: bool = False) -> bytes:
    """The head of a JSON request. `closes`: the connection ends with the answer."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += ["connection: close"] if closes else []
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


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


def open_stream(port: int, body: dict[str, Any], receive_buffer: int = 0) -> socket.socket:
    """Sends a request and reads its first event. Returns the connection."""
    connection, received = connect(port, receive_buffer), b""
    connection.sendall(request("/v1/completions", body))
    while b"data: " not in received and (part := connection.recv(4096)):
        received += part
    return connection


def reset(connection: socket.socket) -> None:
    """Closes a connection as a process that is killed does: with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
