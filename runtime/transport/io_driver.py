"""Drives a transport's sockets from a separate thread or from the event loop of a server.

A thread serves any number of waiting threads and event loops. A server has a single event loop that consumes every
reply; there the loop reads the sockets itself, which saves one thread wake-up and one wait for the GIL per reply.

Both drivers call the transport's `send_and_receive()` after a wake-up or when input is ready, and `finish()` once when
`is_closed` is true. They call all its methods in one thread at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from socket import socketpair
from typing import TYPE_CHECKING, TypeVar

import zmq

from plait.runtime.transport.base import CONNECT_TIMEOUT_S
from plait.runtime.transport.notifier import LoopNotifier

if TYPE_CHECKING:
    from plait.runtime.transport.zmq_client import ZmqClientTransport, ZmqConnection

CLOSED_LOOP_CHECK_S = 0.05  # `stop` waits for the loop's thread and checks this often whether the loop was closed

T = TypeVar("T")


class ThreadIoDriver:
    """A thread that polls the sockets and a wake-up socket pair."""

    def __init__(self, transport: ZmqClientTransport, sockets: ZmqConnection) -> None:
        self._transport, self._sockets = transport, sockets
        self._is_stopped = False
        self._wake_receiver, self._wake_sender = socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="plait-client", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Requests `send_and_receive()`. Thread-safe."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: a wake-up is pending; closed: the thread has ended
            self._wake_sender.send(b"!")

    def wake_soon(self) -> None:
        """Like `wake`."""
        self.wake()

    def stop(self, *, final: bool) -> None:
        """Returns when another thread may use the sockets. `final`: the transport has called `finish` before."""
        self._is_stopped = not final
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(CONNECT_TIMEOUT_S)

    def _run(self) -> None:
        transport, error = self._transport, None
        poller = zmq.Poller()
        for watched in (self._sockets.socket, self._wake_receiver, self._sockets.lifeline):
            poller.register(watched, zmq.POLLIN)
        try:
            while not transport.is_closed and not self._is_stopped:
                ready = dict(poller.poll(int(transport.liveness_interval_s * 1000)))
                if not ready:
                    transport.check_liveness()
                if self._wake_receiver.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_receiver.recv(4096)
                transport.send_and_receive()
                if self._sockets.lifeline.fileno() in ready:
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
    """Drives the sockets from the running event loop. The constructor must run in the loop's thread.

    A ZeroMQ descriptor is edge-triggered: it becomes readable once when input arrives, and any operation on the
    socket may consume that notification. So every read drains the socket, and every send checks for input afterwards.
    For the same reason the creator calls `wake` once: input that arrived earlier may have been announced already.
    """

    def __init__(self, transport: ZmqClientTransport, sockets: ZmqConnection) -> None:
        self._transport, self._sockets = transport, sockets
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._notifier = LoopNotifier.for_running_loop()
        self._fds = (sockets.fd, sockets.lifeline.fileno())
        self._is_stopping = False
        self._has_stopped = threading.Event()  # set when the sockets are free
        self._pending_wake: asyncio.Handle | None = None
        self._received_any = False
        self._loop.add_reader(self._fds[0], self._send_and_receive)
        self._loop.add_reader(self._fds[1], self._on_lifeline)
        self._liveness_timer = self._loop.call_later(transport.liveness_interval_s, self._check_liveness)

    def wake(self) -> None:
        """Requests `send_and_receive()`. Thread-safe."""
        if threading.get_ident() != self._thread_id:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits in it
                self._loop.call_soon_threadsafe(self._send_and_receive)
        elif not self._is_stopping:
            self._transport.flush_queue()
            if self._sockets.has_pending_input:  # sending may have consumed the notification
                self._loop.call_soon(self._send_and_receive)

    def wake_soon(self) -> None:
        """Like `wake`, but combines the requests of one iteration of the loop into one frame."""
        if threading.get_ident() != self._thread_id:
            self.wake()
        elif self._pending_wake is None:
            self._pending_wake = self._loop.call_soon(self._send_and_receive)

    def stop(self, *, final: bool) -> None:
        """Returns when another thread may use the sockets. `final`: the transport has called `finish` before."""
        if threading.get_ident() != self._thread_id:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._stop, final)
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            while not self._loop.is_closed():  # a closed loop does not run `_stop` any more
                if self._has_stopped.wait(CLOSED_LOOP_CHECK_S) or time.monotonic() > deadline:
                    return
        self._stop(final)

    def _send_and_receive(self) -> None:
        if self._is_stopping:
            return
        if self._pending_wake is not None:
            self._pending_wake.cancel()
            self._pending_wake = None
        if self._run_guarded(self._transport.send_and_receive):
            self._received_any = True
            self._notifier.flush()

    def _on_lifeline(self) -> None:
        self._run_guarded(self._transport.check_lifeline)

    def _run_guarded(self, action: Callable[[], T]) -> T:
        """Returns what `action` returns. Stops the driver if `action` raises or the transport is closed afterwards."""
        error = None
        try:
            return action()
        except Exception as raised:
            error = raised
            raise
        finally:
            self._finish_if_closed(error)

    def _check_liveness(self) -> None:
        if not self._received_any:
            self._transport.check_liveness()
        self._received_any = False
        self._liveness_timer = self._loop.call_later(self._transport.liveness_interval_s, self._check_liveness)
        self._send_and_receive()

    def _finish_if_closed(self, error: Exception | None) -> None:
        if (error is not None or self._transport.is_closed) and not self._is_stopping:
            self._stop(True, error)

    def _stop(self, final: bool, error: Exception | None = None) -> None:
        if self._is_stopping:  # callbacks of `finish` may request the stop again
            return
        self._is_stopping = True
        try:
            if not self._loop.is_closed():
                for fd in self._fds:
                    self._loop.remove_reader(fd)
                for timer in (self._liveness_timer, self._pending_wake):
                    if timer is not None:
                        timer.cancel()
            if final:
                self._transport.finish(error)
        finally:
            self._has_stopped.set()
