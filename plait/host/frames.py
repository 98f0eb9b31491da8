"""Frames on a stream socket between two processes: a length (four bytes, little-endian) and that many bytes."""

from __future__ import annotations

import socket

HEADER_BYTES = 4


def encode_frame(body: bytes) -> bytes:
    """Returns `body` as a frame.

    >>> encode_frame(b"ab")
    b'\\x02\\x00\\x00\\x00ab'
    """
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def pop_frame(buffer: bytearray, max_bytes: int) -> bytes | None:
    """Removes the first frame from `buffer` and returns its body; None while the frame is incomplete.

    Raises ValueError for a frame of more than `max_bytes`, after which the sender is not to be trusted.

    >>> pop_frame(bytearray(b"\\x02\\x00\\x00\\x00abc"), 10)
    b'ab'
    """
    if len(buffer) < HEADER_BYTES or len(buffer) < (end := HEADER_BYTES + _length(buffer, max_bytes)):
        return None
    with memoryview(buffer) as view:
        body = bytes(view[HEADER_BYTES:end])
    del buffer[:end]
    return body


def receive_frame(stream: socket.socket, max_bytes: int) -> bytearray:
    """Waits for a frame and returns its body. Raises EOFError when the stream ends, ValueError as `pop_frame`, and the
    socket's OSErrors."""
    return _receive(stream, _length(_receive(stream, HEADER_BYTES), max_bytes))


def _length(header: bytearray, max_bytes: int) -> int:
    length = int.from_bytes(header[:HEADER_BYTES], "little")
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes is longer than {max_bytes}")
    return length


def _receive(stream: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        received = stream.recv_into(view[done:])
        if not received:
            raise EOFError("the other end was closed")
        done += received
    return buffer
