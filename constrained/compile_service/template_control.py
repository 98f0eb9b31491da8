"""The requests from a pool to its template process: five bytes each, with the worker's socket where one is forked."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

FORK = b"f"
REAP = b"r"
_LAYOUT = struct.Struct("<cI")


class ControlRequest(NamedTuple):
    """`connection`: the socket of the worker to fork; None in other requests. `pid`: the killed worker to reap."""

    kind: bytes
    pid: int
    connection: socket.socket | None


def send_fork(control: socket.socket, connection: socket.socket) -> None:
    """Requests a worker that serves `connection`, which the caller may close then. Raises OSError."""
    socket.send_fds(control, [_LAYOUT.pack(FORK, 0)], [connection.fileno()])


def send_reap(control: socket.socket, pid: int) -> None:
    """Says that a worker was killed, and that its process id may be used again. Raises OSError."""
    control.send(_LAYOUT.pack(REAP, pid))


def receive_control(control: socket.socket) -> ControlRequest | None:
    """Waits for the next request; returns None when the socket is closed."""
    data, fds, _, _ = socket.recv_fds(control, _LAYOUT.size, 1)
    if len(data) < _LAYOUT.size:
        return None
    kind, pid = _LAYOUT.unpack(data)
    return ControlRequest(kind, pid, socket.socket(fileno=fds[0]) if fds else None)
