"""Timeouts and limits that uvicorn lacks, for connections that send their headers slowly or do not read.

A connection has `idle_timeout_s` to send a request line and headers, which may take 64 KiB. A connection whose client
does not read for `write_timeout_s` is aborted, and its request ends as after any disconnect.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

_Base: Any = HttpToolsProtocol


class _CoalescingTransport:
    """A transport that joins a response's head with the body that follows in the same loop iteration: one write."""

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._head = transport, loop, b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        """Writes a head that no body has followed."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def make_http_protocol(idle_timeout_s: float, write_timeout_s: float) -> type[asyncio.Protocol]:
    """Returns a protocol class for `uvicorn.Config(http=...)`."""

    class TimeoutProtocol(_Base):  # type: ignore[misc]
        """uvicorn's HTTP protocol with a timer for the head, a limit on its size, and a timer for writes."""

        _head_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(_CoalescingTransport(transport, self.loop))
            self._start_head_timer()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_head_timer()
            self._stop_write_timer()
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            previous_cycle = self.cycle
            super().data_received(data)
            if self.cycle is not previous_cycle:  # the head is complete: a request has started
                self._head_bytes = 0
                self._stop_head_timer()
            elif previous_cycle is None or previous_cycle.response_complete:
                self._count_head(len(data))

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(write_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_write_timer()
            super().resume_writing()

        def _count_head(self, num_bytes: int) -> None:
            self._head_bytes += num_bytes
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()
            elif self._head_timer is None:
                self._start_head_timer()

        def _start_head_timer(self) -> None:
            self._head_timer = self.loop.call_later(idle_timeout_s, self.transport.abort)

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _stop_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

    return TimeoutProtocol
