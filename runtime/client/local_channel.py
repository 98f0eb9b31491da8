"""The channel to a scheduler in this process: a thread of its own steps it.

A thread, and not whoever waits: an interrupt that reaches a waiting caller must not cut a step in two.

Knows: a link to post to, and a step to call. Must not know: what a step does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from plait.runtime.errors import RuntimeGone
from plait.runtime.link import LocalLink
from plait.runtime.messages import Reply, Request, Welcome

CLOSED = "this engine was shut down"


class LocalChannel:
    """See the file's header. `step()` is the scheduler's, and waits for a message when there is nothing to do."""

    def __init__(self, welcome: Welcome, link: LocalLink, step: Callable[[], None]) -> None:
        self.welcome = welcome
        self._link = link
        self._step = step
        self._closing = False
        self._why = CLOSED
        self._thread: threading.Thread | None = None

    def start(self, on_reply: Callable[[Reply], None], on_gone: Callable[[str], None]) -> None:
        self._link.on_reply = on_reply
        self._thread = threading.Thread(target=self._run, args=(on_gone,), name="plait-engine", daemon=True)
        self._thread.start()

    def send(self, request: Request) -> None:
        if self._closing:
            raise RuntimeGone(self._why)
        self._link.post(request)

    def join_loop(self) -> None:
        """Changes nothing: the thread that delivers is the one that steps."""

    def leave_loop(self) -> None:
        """Changes nothing."""

    def close(self) -> None:
        self._closing = True
        self._link.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, on_gone: Callable[[str], None]) -> None:
        try:
            while not self._closing:
                self._step()
        except Exception as error:
            self._why = f"the engine broke: {type(error).__name__}: {error}"
            raise
        finally:
            self._closing = True
            on_gone(self._why)
