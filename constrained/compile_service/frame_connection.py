"""A non-blocking socket that carries frames of messages to and from a process of the compile service."""

from __future__ import annotations

import contextlib
import math
import select
import socket
from time import monotonic

import msgspec

from plait.constrained.compile_service.worker_messages import (
    MAX_FRAME_BYTES,
    CompileJob,
    FromWorker,
    WorkerInit,
    encode,
)
from plait.host.frames import HEADER_BYTES, pop_frame

_BUFFER_BYTES = 1 << 20
_REST_OF_MESSAGE_S = 0.005
_decoder = msgspec.msgpack.Decoder(FromWorker)


class FrameConnection:
    """The pool's end of a socket pair. `is_dead` is set once the other end is closed or has sent an invalid frame.

    >>> ours, theirs = socket.socketpair()                                # doctest: +SKIP
    >>> connection = FrameConnection(ours)                                # doctest: +SKIP
    >>> connection.receive()                                              # doctest: +SKIP
    [WorkerReady(pid=7)]
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):  # the buffer keeps its default size and is only slower
                end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.is_dead = False
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)

    def fileno(self) -> int:
        """Readable when there is something to `receive`."""
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for space in the socket; call `flush` again soon."""
        return bool(self._outgoing) and not self.is_dead

    def send(self, message: WorkerInit | CompileJob) -> None:
        """Queues a message and writes as much as the socket takes."""
        self._outgoing += encode(message)
        self.flush()

    def flush(self) -> None:
        """Writes as much as the socket takes."""
        try:
            while self._outgoing and not self.is_dead:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self.is_dead = True

    def receive(self) -> list[FromWorker]:
        """Returns the messages that are complete. Waits at most 5 ms, and only for the rest of a message."""
        until = math.inf
        while not self.is_dead:
            try:
                received = self.socket.recv(_BUFFER_BYTES)
                self._incoming += received
                self.is_dead = not received
            except BlockingIOError:
                until = min(until, monotonic() + _REST_OF_MESSAGE_S)
                if not self._is_within_message() or monotonic() >= until:
                    break
                self._readable.poll(1)
            except OSError:
                self.is_dead = True
        messages: list[FromWorker] = []
        try:
            while (body := pop_frame(self._incoming, MAX_FRAME_BYTES)) is not None:
                messages.append(_decoder.decode(body))
        except (ValueError, msgspec.DecodeError):
            self.is_dead = True
        return messages

    def _is_within_message(self) -> bool:
        """Whether a part of a message has arrived: a socket holds less than a large automaton."""
        end = HEADER_BYTES + int.from_bytes(self._incoming[:HEADER_BYTES], "little")
        return 0 < len(self._incoming) < end

    def close(self) -> None:
        self.is_dead = True
        self.socket.close()
