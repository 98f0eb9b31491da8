"""The transport that uvicorn's protocol writes to: joins head and body, and closes without losing a response.

A socket that is closed while input of its client is unread sends a reset, on which the client drops a response that it
has not read yet. So `close` first ends only the sending side, and reads and discards what the client still sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

MAX_DISCARDED_BYTES = 1 << 26
DISCARD_TIMEOUT_S = 10.0  # in all
DISCARD_IDLE_TIMEOUT_S = 2.0  # without any input


class ResponseTransport:
    """A transport for one connection. A response's head is written together with the body of the same loop iteration.

    `has_unread_input()`: whether the client may still be sending. Writes after `close` are dropped.
    """

    __slots__ = (
        "_deadline",
        "_discard_timer",
        "_has_unread_input",
        "_head",
        "_loop",
        "_num_discarded",
        "_transport",
        "is_discarding",
    )

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, has_unread_input: Callable[[], bool]
    ) -> None:
        self._transport, self._loop, self._has_unread_input = transport, loop, has_unread_input
        self._head = b""
        self._deadline, self._num_discarded = 0.0, 0
        self._discard_timer: asyncio.TimerHandle | None = None
        self.is_discarding = False

    def write(self, data: bytes) -> None:
        """Writes `data`; a response's head at the end of this iteration of the loop at the latest."""
        if self.is_closing():
            return
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self.is_discarding or self._transport.is_closing()

    def close(self) -> None:
        """Sends what was written, then closes the connection once the client's input has ended, or at a limit."""
        if self.is_closing():
            return
        self._flush()
        if not self._has_unread_input():
            self._transport.close()
            return
        self.is_discarding = True
        self._deadline = self._loop.time() + DISCARD_TIMEOUT_S
        self._discard_timer = self._loop.call_later(DISCARD_IDLE_TIMEOUT_S, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()

    def discard(self, num_bytes: int) -> None:
        """Counts input that arrived after `close`."""
        self._num_discarded += num_bytes
        seconds_left = self._deadline - self._loop.time()
        if self._num_discarded > MAX_DISCARDED_BYTES or seconds_left <= 0:
            self._transport.abort()
            return
        self.stop_timer()
        self._discard_timer = self._loop.call_later(min(DISCARD_IDLE_TIMEOUT_S, seconds_left), self._transport.abort)

    def stop_timer(self) -> None:
        """Stops the timer of `close`; call it when the connection is lost."""
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def _flush(self) -> None:
        """Writes a head that no body has followed."""
        if self._head:
            head, self._head = self._head, b""
            if not self._transport.is_closing():
                self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
