"""One client's sockets: a ZeroMQ DEALER for frames, and the lifeline that ends when the scheduler's process does.

Nothing here waits, but for the greeting. One thread at a time may use it.

Knows: sockets, frames. Must not know: threads, event loops, what the messages mean.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import PROTOCOL, Hello, Welcome, build_frame, build_frames, decode_server_messages, encode
from plait.runtime.transport.zmq_server import CLIENT_ID_BYTES, FRAMES_SOCKET, LIFELINE_SOCKET

CONNECT_TIMEOUT_S = 30.0
MAX_FRAMES_PER_POLL = 4096  # taken from the socket before they are delivered


class ZmqConnection:
    """Connected to the runtime whose directory is `directory`. RuntimeGone where none answers."""

    def __init__(self, directory: Path) -> None:
        client_id = os.urandom(CLIENT_ID_BYTES)
        self.lifeline = _open_lifeline(directory, client_id)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.IDENTITY, client_id)
        self.socket.connect(f"ipc://{directory / FRAMES_SOCKET}")

    def handshake(self, exit_reason: Callable[[], str]) -> Welcome:
        """Waits for the scheduler's Welcome. RuntimeGone when there is none, or it speaks another protocol."""
        self.socket.send(build_frame([encode(Hello(PROTOCOL))]))
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.socket.poll(100):
                try:
                    reply = decode_server_messages(self.socket.recv())[0]
                except (msgspec.DecodeError, IndexError) as error:
                    raise RuntimeGone(f"the runtime speaks another version of the protocol: {error}") from None
                if isinstance(reply, Welcome) and reply.protocol == PROTOCOL:
                    return reply
                raise RuntimeGone("the runtime speaks another version of the protocol; upgrade both to one version")
            if self.peer_has_exited():
                raise RuntimeGone(exit_reason())
        raise RuntimeGone(f"the runtime did not answer within {CONNECT_TIMEOUT_S:.0f} s")

    def send(self, requests: deque[bytes]) -> None:
        """Empties `requests`, encoded ones, into few frames."""
        taken: list[bytes] = []
        while requests:  # others may append meanwhile
            taken.append(requests.popleft())
        for frame in build_frames(taken):
            self.socket.send(frame)

    def receive_frames(self) -> list[bytes]:
        """What has come, all of it unless that is `MAX_FRAMES_PER_POLL`: those who wait are woken when all of a step is here."""
        frames: list[bytes] = []
        with contextlib.suppress(zmq.Again):
            while len(frames) < MAX_FRAMES_PER_POLL:
                frames.append(self.socket.recv(zmq.NOBLOCK))
        return frames

    @property
    def fd(self) -> int:
        """Readable once when something may have come: see `has_pending_input`."""
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def has_pending_input(self) -> bool:
        """Whether `receive_frames` would give something. The socket's descriptor tells of it only once."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def peer_has_exited(self) -> bool:
        """Whether the scheduler's process has."""
        try:
            return not self.lifeline.recv(16)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """The scheduler drops this client's sessions."""
        self.socket.close()
        self._context.term()
        self.lifeline.close()


def _open_lifeline(directory: Path, client_id: bytes) -> socket.socket:
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lifeline.settimeout(CONNECT_TIMEOUT_S)
    try:
        lifeline.connect(str(directory / LIFELINE_SOCKET))
        lifeline.sendall(client_id)
        if lifeline.recv(1) != b"+":
            raise ConnectionError("it refused the connection")
    except OSError as error:
        lifeline.close()
        raise RuntimeGone(f"no runtime answers at {str(directory)!r} ({error})") from None
    lifeline.setblocking(False)
    return lifeline
