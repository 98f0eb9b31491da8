"""The channel to a scheduler in another process: requests queued from any thread, replies delivered by one.

Who that one is, a driver says: at first a thread of the channel's own, in a server its event loop. When the lifeline
ends, the scheduler's process has, and every waiting call is told at once.

Knows: queues, frames, silence. Must not know: what the messages mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from plait.runtime.after_fork import call_in_forked_children
from plait.runtime.client.dealer import MAX_FRAMES, Dealer
from plait.runtime.client.drivers import Driver, LoopDriver, ThreadDriver
from plait.runtime.errors import DIED, RuntimeGone
from plait.runtime.messages import Append, Close, Inspect, Open, Reply, Request, decode_replies, encode, encode_request

CLOSED = "this client was closed"
POLL_S, SILENT_S = 5.0, 120.0  # after a silent poll the scheduler is asked for a sign of life
NOBODY = 0  # the call id of such a question: its answer is for no call
UNHURRIED = (Open, Append)  # do nothing by themselves: they go with what follows them


class ZmqChannel:
    """See the file's header. `address` is the runtime's directory."""

    def __init__(self, address: str | Path, why_it_died: Callable[[], str] = lambda: DIED) -> None:
        self._why_it_died = why_it_died
        self._dealer = Dealer(Path(address))
        self._queue: deque[bytes] = deque()
        self.poll_s, self._silent_s = POLL_S, SILENT_S
        self._silent_polls = 0  # counted in polls, not seconds: a process that was stopped has not listened either
        self._closing = self._has_ended = False
        self._gone: str | None = None
        self._driver: Driver | None = None
        self.welcome = self._dealer.greet(why_it_died)
        call_in_forked_children(self._after_fork)

    def start(self, on_reply: Callable[[Reply], None], on_gone: Callable[[str], None]) -> None:
        self._on_reply, self._on_gone = on_reply, on_gone
        self._driver = ThreadDriver(self, self._dealer)

    def send(self, request: Request) -> None:
        message = encode_request(request)
        if self._gone is not None or self._closing:
            raise RuntimeGone(self._gone or CLOSED)
        self._queue.append(message)
        if self._driver is None or isinstance(request, UNHURRIED):
            return
        if isinstance(request, Close):
            self._driver.wake_later()
        else:
            self._driver.wake()

    def join_loop(self) -> None:
        """Delivers in the running event loop's own thread from now on. Call it there."""
        self._change_driver(LoopDriver)

    def leave_loop(self) -> None:
        """Delivers in a thread again. Call it where `join_loop` was called, before the loop is closed."""
        self._change_driver(ThreadDriver)

    def close(self) -> None:
        self._closing = True
        if self._driver is not None:
            self._driver.stop(ends=True)
        elif not self._has_ended:
            self._has_ended = True
            self._dealer.close()

    def _change_driver(self, kind: type[LoopDriver] | type[ThreadDriver]) -> None:
        if self._driver is None or self.is_over:
            return
        self._driver.stop(ends=False)
        if not self.is_over:
            self._driver = kind(self, self._dealer)
            self._driver.wake()  # for what was queued and what came in between

    # -- what the driver calls --------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Nothing more can be sent or will come."""
        return self._closing or self._gone is not None

    def turn(self) -> bool:
        """Sends what is queued and delivers what has come; whether anything had."""
        self.send_queued()
        heard, frames = False, self._dealer.received()
        while frames:
            heard, self._silent_polls = True, 0
            for frame in frames:
                for reply in decode_replies(frame):
                    self._on_reply(reply)
            frames = self._dealer.received() if len(frames) == MAX_FRAMES else []
        return heard

    def send_queued(self) -> None:
        if self._queue:
            self._dealer.send(self._queue)

    def look_at_lifeline(self) -> None:
        """Something happened to it."""
        if self._dealer.has_ended():
            self.turn()  # what it said before it died still counts
            self._gone = self._why_it_died()

    def be_silent(self) -> None:
        """Nothing came for `poll_s`: asks for a sign of life, and gives up after many unanswered questions."""
        self._silent_polls += 1
        self._queue.append(encode(Inspect(NOBODY)))
        if self._silent_polls * self.poll_s >= self._silent_s:
            silence = f"the runtime has not answered for {self._silent_s:g} s"
            self._gone = f"{silence}; its process may be stuck or stopped"

    def end(self, error: Exception | None) -> None:
        """The last call: closes the sockets and tells who waits. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        if error is not None:
            self._gone = f"the connection to the runtime broke: {error}"
        self._dealer.close()
        self._on_gone(self._gone or CLOSED)

    def _after_fork(self) -> None:
        """In a forked child: the thread is not here, and the parent's lifeline is not ours to hold open."""
        self._gone = "this process was forked from one that used the runtime; start or connect a Runtime after the fork"
        self._dealer.lifeline.close()
