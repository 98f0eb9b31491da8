"""Limits of a connection that uvicorn lacks: on input that waits, heads, trailers, unread bodies and unread responses.

A connection holds less than 1 MiB of input that no request has taken, before and after its API key is checked:

- Input is parsed in slices, and not at all while a request waits behind the running one; the connection is then no
  longer read.
- A request line with its headers, the trailers of a chunked body and the extensions of a chunk may take 64 KiB.
- A request line with its headers must arrive within 30 s of its first byte, the first one of the connection's start.
  Between two requests a connection may be idle for `idle_timeout_s`, also the limit for a head if it is shorter. The
  rest of a body whose response has been sent is discarded, within the limits of `ResponseTransport`.
- A client that reads less than 2 KiB/s for `write_timeout_s`, while more than 64 KiB wait for it, is disconnected, and
  its request ends as after any disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
HEAD_TIMEOUT_S = 30.0
MAX_HEADERS = 256
MAX_UNPARSED_BYTES = 1 << 16  # reading pauses above it; one read adds up to 256 KiB
MIN_READ_BYTES_PER_S = 2048
SLICE_BYTES = 2048  # of input that is parsed at once; it holds at most 128 requests
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

_Base: Any = HttpToolsProtocol


class _BoundedFlow(FlowControl):
    """uvicorn's flow control, which does not resume reading while `is_full()`."""

    def __init__(self, transport: Any, is_full: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_full = is_full

    def resume_reading(self) -> None:
        if not self._is_full():
            super().resume_reading()


def make_http_protocol(idle_timeout_s: float, write_timeout_s: float) -> type[asyncio.Protocol]:
    """Returns a protocol class for `uvicorn.Config(http=...)`."""

    class LimitedProtocol(_LimitedProtocol):
        _head_timeout_s, _write_timeout_s = min(idle_timeout_s, HEAD_TIMEOUT_S), write_timeout_s

    return LimitedProtocol


class _LimitedProtocol(_Base):  # type: ignore[misc]
    """uvicorn's HTTP protocol with limits; see the top of this file."""

    _head_timeout_s: float
    _write_timeout_s: float
    _timer: asyncio.TimerHandle | None = None  # for a head, or for the rest of a body whose response was sent
    _write_timer: asyncio.TimerHandle | None = None
    _is_in_message = _is_head_complete = _has_progressed = False
    _num_headers = _num_head_bytes = _num_discarded = 0

    # -- the transport ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._unparsed = bytearray()
        super().connection_made(ResponseTransport(transport, self.loop, self._has_unread_input))
        self.flow = _BoundedFlow(self.transport, lambda: len(self._unparsed) >= MAX_UNPARSED_BYTES)
        self._start_timer(self._head_timeout_s)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        self.transport.stop_timer()
        self._unparsed.clear()
        super().connection_lost(error)

    def shutdown(self) -> None:
        if self.transport.is_discarding:
            self.transport.abort()
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    # -- input ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_discarding:
            self.transport.discard(len(data))
            return
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parses what has arrived, until a request waits behind the running one."""
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            data = bytes(self._unparsed[:SLICE_BYTES])
            del self._unparsed[:SLICE_BYTES]
            self._has_progressed = False
            super().data_received(data)
            self._count(len(data))
        if self.transport.is_closing():
            self._unparsed.clear()
        elif len(self._unparsed) >= MAX_UNPARSED_BYTES:
            self.flow.pause_reading()
        if self._is_running:
            self._stop_timer()
        elif self._timer is None and (self.timeout_keep_alive_task is None or self._is_in_head):
            self._unset_keepalive_if_required()
            self._start_timer(self._head_timeout_s)

    def _count(self, num_bytes: int) -> None:
        """Counts bytes that completed neither a head nor a part of a body, and bytes of a body that nobody reads."""
        if self._is_answered_early:
            self._num_discarded += num_bytes
            if self._num_discarded > MAX_DISCARDED_BYTES:
                self.transport.close()
        self._num_head_bytes = 0 if self._has_progressed else self._num_head_bytes + num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse()

    def _refuse(self) -> None:
        """Answers 431 and closes the connection, after too large headers or trailers."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if self._is_answered_early:
            self.transport.close()
            return
        if self._is_running:
            if cycle.response_started or not self._is_head_complete:
                self.transport.abort()  # 431 would be taken for another request's response
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    # -- what the parser calls --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_in_message, self._is_head_complete = True, False
        self._num_headers = self._num_discarded = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._refuse()
        elif not self._is_head_complete:  # a trailer is dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._is_head_complete = self._has_progressed = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        was_answered = self._is_answered_early
        self._is_in_message, self._has_progressed = False, True
        if self.transport.is_closing():
            return
        super().on_message_complete()
        if was_answered:  # the connection is idle now
            self._stop_timer()
            seconds, close = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(seconds, close)

    # -- responses --------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._parse()
        self.flow.resume_reading()
        if self._is_answered_early:
            self._unset_keepalive_if_required()
            self._stop_timer()
            self._start_timer(DISCARD_TIMEOUT_S)

    @property
    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_in_head(self) -> bool:
        return self._is_in_message and not self._is_head_complete

    @property
    def _is_answered_early(self) -> bool:
        """Whether the response was sent before the request's body has arrived."""
        return self._is_in_message and self._is_head_complete and not self._is_running

    def _has_unread_input(self) -> bool:
        return self._is_in_message or bool(self._unparsed)

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_write_timer(self) -> None:
        num_waiting = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._write_timeout_s, self._check_reading, num_waiting)

    def _check_reading(self, num_waiting: int) -> None:
        """Ends the connection if its client has read too little of what waited when the timer was started."""
        num_read = num_waiting - self.transport.get_write_buffer_size()
        if num_read < MIN_READ_BYTES_PER_S * self._write_timeout_s:
            self.transport.abort()
        else:
            self._start_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


# -- response transport ---------------------------------------------------------------------------
# The transport that uvicorn's protocol writes to: joins head and body, and closes without losing a response.
#
# A socket that is closed while input of its client is unread sends a reset, on which the client drops a response that
# it has not read yet. So `close` first ends only the sending side, and reads and discards what the client still sends.

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
