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

from plait.runtime.client.dealer import CONNECT_TIMEOUT_S, Dealer

LOOK_EVERY_S = 0.05  # whether a loop that is to stop was closed instead

T = TypeVar("T")


class Turned(Protocol):
    """A channel, as its driver sees it. All but `is_over` are called in one thread at a time."""

    poll_s: float

    @property
    def is_over(self) -> bool: ...
    def send_queued(self) -> None: ...
    def turn(self) -> bool: ...
    def look_at_lifeline(self) -> None: ...
    def be_silent(self) -> None: ...
    def end(self, error: Exception | None) -> None: ...


class Driver(Protocol):
    """Calls a channel's `turn()` whenever it is asked to or something came, and `end()` once when it `is_over`."""

    def wake(self) -> None:
        """Asks for a turn, from any thread."""

    def wake_later(self) -> None:
        """Asks for a turn soon: what asks so at the same time goes in one frame, where that can be had."""

    def stop(self, *, ends: bool) -> None:
        """Returns once the sockets are free for another thread; `ends`: the channel's `end` was called before."""


class ThreadDriver:
    """A thread that waits for the sockets and for `wake`."""

    def __init__(self, channel: Turned, dealer: Dealer) -> None:
        self._channel, self._dealer = channel, dealer
        self._is_stopped = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="plait-client", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: awake already; closed: nothing to wake
            self._wake_in.send(b"!")

    def wake_later(self) -> None:
        self.wake()  # a thread has no later

    def stop(self, *, ends: bool) -> None:
        self._is_stopped = not ends
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(CONNECT_TIMEOUT_S)

    def _run(self) -> None:
        channel, error = self._channel, None
        poller = zmq.Poller()
        for watched in (self._dealer.socket, self._wake_out, self._dealer.lifeline):
            poller.register(watched, zmq.POLLIN)
        try:
            while not channel.is_over and not self._is_stopped:
                ready = dict(poller.poll(int(channel.poll_s * 1000)))
                if not ready:
                    channel.be_silent()
                if self._wake_out.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_out.recv(4096)
                channel.turn()
                if self._dealer.lifeline.fileno() in ready:
                    channel.look_at_lifeline()
        except Exception as raised:
            error = raised
            raise
        finally:
            if error is not None or channel.is_over:
                channel.end(error)
            for end in (self._wake_in, self._wake_out):
                end.close()


class LoopDriver:
    """The running event loop, in whose thread this is made: what is sent there goes without a change of thread.

    It needs one `wake` at first: of what came before, the socket may have told already.
    """

    def __init__(self, channel: Turned, dealer: Dealer) -> None:
        self._channel, self._dealer = channel, dealer
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._fds = (dealer.descriptor, dealer.lifeline.fileno())
        self._is_stopping = False
        self._has_stopped = threading.Event()  # and the sockets are free
        self._later: asyncio.Handle | None = None
        self._heard = False
        self._loop.add_reader(self._fds[0], self._turn)
        self._loop.add_reader(self._fds[1], self._on_lifeline)
        self._tick_handle = self._loop.call_later(channel.poll_s, self._tick)

    def wake(self) -> None:
        if threading.get_ident() != self._thread_id:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits in it
                self._loop.call_soon_threadsafe(self._turn)
        elif not self._is_stopping:
            self._channel.send_queued()
            if self._dealer.has_more:  # sending may have taken the notice of it
                self._loop.call_soon(self._turn)

    def wake_later(self) -> None:
        if threading.get_ident() != self._thread_id:
            self.wake()
        elif self._later is None:
            self._later = self._loop.call_soon(self._turn)

    def stop(self, *, ends: bool) -> None:
        if threading.get_ident() != self._thread_id:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._stop, ends)
            give_up_at = time.monotonic() + CONNECT_TIMEOUT_S
            while not self._loop.is_closed():  # a loop that is being closed runs nothing more
                if self._has_stopped.wait(LOOK_EVERY_S) or time.monotonic() > give_up_at:
                    return
        self._stop(ends)

    def _turn(self) -> None:
        """Sends, and takes what has come until nothing is left: the socket only tells of what is new."""
        if self._is_stopping:
            return
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._heard |= self._done(self._channel.turn)

    def _on_lifeline(self) -> None:
        self._done(self._channel.look_at_lifeline)

    def _done(self, part: Callable[[], T]) -> T:
        """What `part` of the channel gives; the channel ends where it raises, or is over then."""
        error = None
        try:
            return part()
        except Exception as raised:
            error = raised
            raise
        finally:
            self._end_if_over(error)

    def _tick(self) -> None:
        if not self._heard:
            self._channel.be_silent()
        self._heard = False
        self._tick_handle = self._loop.call_later(self._channel.poll_s, self._tick)
        self._turn()

    def _end_if_over(self, error: Exception | None) -> None:
        if (error is not None or self._channel.is_over) and not self._is_stopping:
            self._stop(True, error)

    def _stop(self, ends: bool, error: Exception | None = None) -> None:
        if self._is_stopping:  # those whom the end is told may ask for it again
            return
        self._is_stopping = True
        try:
            if not self._loop.is_closed():
                for fd in self._fds:
                    self._loop.remove_reader(fd)
                for timer in (self._tick_handle, self._later):
                    if timer is not None:
                        timer.cancel()
            if ends:
                self._channel.end(error)
        finally:
            self._has_stopped.set()
