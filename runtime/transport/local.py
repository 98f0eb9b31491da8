"""The channel to a scheduler in this process: a thread of its own steps it.

A thread, and not whoever waits: an interrupt that reaches a waiting caller must not cut a step in two.

Knows: a link to post to, and a step to call. Must not know: what a step does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import ClientMessage, ServerMessage, Welcome
from plait.runtime.transport.zmq_server import LocalServerTransport

CLOSED = "this engine was shut down"


class LocalClientTransport:
    """See the file's header. `step()` is the scheduler's, and waits for a message when there is nothing to do."""

    def __init__(self, welcome: Welcome, server: LocalServerTransport, step: Callable[[], None]) -> None:
        self.welcome = welcome
        self._server = server
        self._step = step
        self._closing = False
        self._stop_reason = CLOSED
        self._thread: threading.Thread | None = None

    def start(self, on_reply: Callable[[ServerMessage], None], on_disconnect: Callable[[str], None]) -> None:
        self._server.on_reply = on_reply
        self._thread = threading.Thread(target=self._run, args=(on_disconnect,), name="plait-engine", daemon=True)
        self._thread.start()

    def send(self, request: ClientMessage) -> None:
        if self._closing:
            raise RuntimeGone(self._stop_reason)
        self._server.enqueue(request)

    def attach_to_loop(self) -> None:
        """Changes nothing: the thread that delivers is the one that steps."""

    def detach_from_loop(self) -> None:
        """Changes nothing."""

    def close(self) -> None:
        self._closing = True
        self._server.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, on_disconnect: Callable[[str], None]) -> None:
        try:
            while not self._closing:
                self._step()
        except Exception as error:
            self._stop_reason = f"the engine broke: {type(error).__name__}: {error}"
            raise
        finally:
            self._closing = True
            on_disconnect(self._stop_reason)
