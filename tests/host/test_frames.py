"""Frames: what was sent is received, in any pieces; a wrong length and the end of the stream are errors."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.host.frames import encode_frame, pop_frame, receive_frame


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 9))
def test_frames_come_out_as_they_went_in(bodies: list[bytes], piece: int) -> None:
    data, buffer, popped = b"".join(map(encode_frame, bodies)), bytearray(), []
    for at in range(0, len(data), piece):
        buffer += data[at : at + piece]
        while (body := pop_frame(buffer, 40)) is not None:
            popped.append(body)
    assert popped == bodies and not buffer
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(data)
        assert [bytes(receive_frame(theirs, 40)) for _ in bodies] == bodies
        with pytest.raises(EOFError):
            receive_frame(theirs, 40)


def test_a_frame_beyond_the_limit_is_not_read() -> None:
    with pytest.raises(ValueError, match="a frame of 41 bytes is longer than 40"):
        pop_frame(bytearray(encode_frame(b"x" * 41)), 40)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((1 << 31).to_bytes(4, "little"))
        with pytest.raises(ValueError, match="longer"):
            receive_frame(theirs, 1 << 30)


def test_a_frame_that_ends_too_early() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(encode_frame(b"abc")[:-1])
        with pytest.raises(EOFError):
            receive_frame(theirs, 40)
