"""The channel to a scheduler in this process: whoever waits makes it step.

Knows: a link to post to, a step to call, and who may call it. Must not know: what a step does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from plait.runtime.errors import RuntimeGone
from plait.runtime.link import LocalLink
from plait.runtime.messages import Reply, Request, Welcome

TURN_S = 0.01  # how long one waiter lets another's step go on before it looks again
IDLE_STEP_S = 0.05


class LocalChannel:
    """See the file's header. `step(timeout_s)` is the scheduler's."""

    def __init__(self, welcome: Welcome, link: LocalLink, step: Callable[[float], None]) -> None:
        self.welcome = welcome
        self._link = link
        self._step = step
        self._stepping = threading.Lock()
        self._closed = False
        self._pump: threading.Thread | None = None
        self._on_gone: Callable[[str], None] = lambda why: None

    def start(self, on_reply: Callable[[Reply], None], on_gone: Callable[[str], None]) -> None:
        self._link.on_reply = on_reply
        self._on_gone = on_gone

    def send(self, request: Request) -> None:
        if self._closed:
            raise RuntimeGone("this engine was shut down")
        self._link.post(request)

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            if self._closed or (deadline is not None and time.monotonic() >= deadline):
                return ready()
            if not self._stepping.acquire(blocking=False):
                condition.wait(TURN_S)  # another thread is stepping; it may need our condition to deliver
                continue
            condition.release()
            try:
                self._step_once()
            finally:
                self._stepping.release()
                condition.acquire()
        return True

    def pump(self) -> None:
        """From now on a thread of our own steps, for callers that wait on an event loop."""
        with self._stepping:
            if self._pump is None and not self._closed:
                self._pump = threading.Thread(target=self._run, name="plait-engine", daemon=True)
                self._pump.start()

    def close(self) -> None:
        if self._closed:
            return
        with self._stepping:
            self._closed = True
        if self._pump is not None and self._pump is not threading.current_thread():
            self._pump.join()

    def _run(self) -> None:
        while not self._closed:
            with self._stepping:
                self._step_once()

    def _step_once(self) -> None:
        if self._closed:
            return
        try:
            self._step(IDLE_STEP_S)
        except Exception as error:
            self._closed = True
            self._on_gone(f"the engine broke: {type(error).__name__}: {error}")
            raise
