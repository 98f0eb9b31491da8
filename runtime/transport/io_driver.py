"""Who turns a channel's sockets: a thread of its own, or the event loop of a process that has little else to do.

A thread serves any number of waiting threads and loops. A server has one loop, where every answer is wanted: there the
thread would only hand over what it read, and each hand-over is a wake-up and a wait for the interpreter's lock.

Knows: threads, event loops, pollers. Must not know: what is sent or delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import zmq

from plait.runtime.transport.zmq_connection import CONNECT_TIMEOUT_S, ZmqConnection

CLOSED_LOOP_CHECK_S = 0.05  # whether a loop that is to stop was closed instead

T = TypeVar("T")


class DrivenTransport(Protocol):
    """A channel, as its driver sees it. All but `is_closed` are called in one thread at a time."""

    silence_check_s: float

    @property
    def is_closed(self) -> bool: ...
    def flush_queue(self) -> None: ...
    def send_and_receive(self) -> bool: ...
    def check_lifeline(self) -> None: ...
    def on_silence(self) -> None: ...
    def finish(self, error: Exception | None) -> None: ...


class IoDriver(Protocol):
    """Calls a channel's `send_and_receive()` whenever it is asked to or something came, and `finish()` once when it `is_closed`."""

    def wake(self) -> None:
        """Asks for a turn, from any thread."""

    def wake_soon(self) -> None:
        """Asks for a turn soon: what asks so at the same time goes in one frame, where that can be had."""

    def stop(self, *, final: bool) -> None:
        """Returns once the sockets are free for another thread; `final`: the channel's `finish` was called before."""


class ThreadIoDriver:
    """A thread that waits for the sockets and for `wake`."""

    def __init__(self, transport: DrivenTransport, connection: ZmqConnection) -> None:
        self._transport, self._connection = transport, connection
        self._is_stopped = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="plait-client", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: awake already; closed: nothing to wake
            self._wake_sender.send(b"!")

    def wake_soon(self) -> None:
        self.wake()  # a thread has no later

    def stop(self, *, final: bool) -> None:
        self._is_stopped = not final
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(CONNECT_TIMEOUT_S)

    def _run(self) -> None:
        transport, error = self._transport, None
        poller = zmq.Poller()
        for watched in (self._connection.socket, self._wake_receiver, self._connection.lifeline):
            poller.register(watched, zmq.POLLIN)
        try:
            while not transport.is_closed and not self._is_stopped:
                ready = dict(poller.poll(int(transport.silence_check_s * 1000)))
                if not ready:
                    transport.on_silence()
                if self._wake_receiver.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_receiver.recv(4096)
                transport.send_and_receive()
                if self._connection.lifeline.fileno() in ready:
                    transport.check_lifeline()
        except Exception as raised:
            error = raised
            raise
        finally:
            if error is not None or transport.is_closed:
                transport.finish(error)
            for end in (self._wake_sender, self._wake_receiver):
                end.close()


class EventLoopIoDriver:
    """The running event loop, in whose thread this is made: what is sent there goes without a change of thread.

    It needs one `wake` at first: of what came before, the socket may have told already.
    """

    def __init__(self, transport: DrivenTransport, connection: ZmqConnection) -> None:
        self._transport, self._connection = transport, connection
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._fds = (connection.fd, connection.lifeline.fileno())
        self._is_stopping = False
        self._has_stopped = threading.Event()  # and the sockets are free
        self._pending_wake: asyncio.Handle | None = None
        self._received_any = False
        self._loop.add_reader(self._fds[0], self._send_and_receive)
        self._loop.add_reader(self._fds[1], self._on_lifeline)
        self._silence_timer = self._loop.call_later(transport.silence_check_s, self._check_silence)

    def wake(self) -> None:
        if threading.get_ident() != self._thread_id:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits in it
                self._loop.call_soon_threadsafe(self._send_and_receive)
        elif not self._is_stopping:
            self._transport.flush_queue()
            if self._connection.has_pending_input:  # sending may have taken the notice of it
                self._loop.call_soon(self._send_and_receive)

    def wake_soon(self) -> None:
        if threading.get_ident() != self._thread_id:
            self.wake()
        elif self._pending_wake is None:
            self._pending_wake = self._loop.call_soon(self._send_and_receive)

    def stop(self, *, final: bool) -> None:
        if threading.get_ident() != self._thread_id:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._stop, final)
            give_up_at = time.monotonic() + CONNECT_TIMEOUT_S
            while not self._loop.is_closed():  # a loop that is being closed runs nothing more
                if self._has_stopped.wait(CLOSED_LOOP_CHECK_S) or time.monotonic() > give_up_at:
                    return
        self._stop(final)

    def _send_and_receive(self) -> None:
        """Sends, and takes what has come until nothing is left: the socket only tells of what is new."""
        if self._is_stopping:
            return
        if self._pending_wake is not None:
            self._pending_wake.cancel()
            self._pending_wake = None
        self._received_any |= self._run_guarded(self._transport.send_and_receive)

    def _on_lifeline(self) -> None:
        self._run_guarded(self._transport.check_lifeline)

    def _run_guarded(self, action: Callable[[], T]) -> T:
        """What `action` of the channel gives; the channel ends where it raises, or is over then."""
        error = None
        try:
            return action()
        except Exception as raised:
            error = raised
            raise
        finally:
            self._finish_if_closed(error)

    def _check_silence(self) -> None:
        if not self._received_any:
            self._transport.on_silence()
        self._received_any = False
        self._silence_timer = self._loop.call_later(self._transport.silence_check_s, self._check_silence)
        self._send_and_receive()

    def _finish_if_closed(self, error: Exception | None) -> None:
        if (error is not None or self._transport.is_closed) and not self._is_stopping:
            self._stop(True, error)

    def _stop(self, final: bool, error: Exception | None = None) -> None:
        if self._is_stopping:  # those whom the end is told may ask for it again
            return
        self._is_stopping = True
        try:
            if not self._loop.is_closed():
                for fd in self._fds:
                    self._loop.remove_reader(fd)
                for timer in (self._silence_timer, self._pending_wake):
                    if timer is not None:
                        timer.cancel()
            if final:
                self._transport.finish(error)
        finally:
            self._has_stopped.set()
