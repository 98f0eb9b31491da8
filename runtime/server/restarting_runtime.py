"""A runtime process that is started again when it dies, so that the server in front of it stays.

One that dies soon after it started counts as a failed start: the pause before the next doubles. After `MAX_FAILURES` of
them in a row there is no further attempt.

Knows: `launch.Runtime` and when to try again. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.runtime.errors import PlaitError, RuntimeGone
from plait.runtime.process.runtime import Runtime

if TYPE_CHECKING:
    from plait.runtime.client.client import Client

POLL_INTERVAL_S = 0.1
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
STABLE_AFTER_S = 60.0  # a runtime that lived so long had been started well
MAX_FAILURES = 8

log = logging.getLogger("plait.server")


class RestartingRuntime:
    """Settings are those of `Runtime`. Starts one at once and raises what that raises; a thread replaces it later.
    `meanwhile` is called while the first one loads.

    `num_restarts` counts the replacements. `has_given_up`: there will be no other.
    """

    def __init__(
        self, model_path: str | None = None, meanwhile: Callable[[], object] | None = None, **settings: Any
    ) -> None:
        self._model_path, self._settings = model_path, settings
        self._runtime = self._start(meanwhile)
        self._started_at = time.monotonic()
        self._num_failures = 0
        self.num_restarts = 0
        self.has_given_up = False
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._watch, name="plait-restart", daemon=True)
        self._thread.start()

    @property
    def client(self) -> Client:
        """The client of the runtime that lives. Raises RuntimeGone while there is none."""
        client = self._runtime.client
        if client.is_closed:
            raise RuntimeGone("the runtime process has ended and is being started again")
        return client

    def attach_to_loop(self) -> None:
        """The running event loop reads what the runtime says, whichever lives. Call it there."""
        self._loop = asyncio.get_running_loop()
        self._runtime.client.attach_to_loop()

    def detach_from_loop(self) -> None:
        """Undoes `attach_to_loop`, before the loop is closed."""
        self._loop = None
        self._runtime.client.detach_from_loop()

    def shutdown(self) -> None:
        """Ends the runtime. Idempotent."""
        self._closing.set()
        self._runtime.shutdown()

    def _join_later(self, loop: asyncio.AbstractEventLoop, runtime: Runtime) -> None:
        """In `loop`, which may have been left since this was asked for."""
        if self._loop is loop:
            runtime.client.attach_to_loop()

    def _start(self, meanwhile: Callable[[], object] | None = None) -> Runtime:
        return Runtime(self._model_path, meanwhile=meanwhile, **self._settings)

    def _watch(self) -> None:
        while not self._closing.wait(POLL_INTERVAL_S):
            if self._runtime.client.is_closed:
                self._replace()
            if self.has_given_up:
                return

    def _replace(self) -> None:
        """One attempt, after the pause that is due."""
        began = time.monotonic()
        self._runtime.shutdown()
        if self._closing.is_set():
            return
        self._num_failures = 0 if began - self._started_at > STABLE_AFTER_S else self._num_failures + 1
        if self._num_failures > MAX_FAILURES:
            log.error("the runtime did not stay up in %d attempts", MAX_FAILURES)
            self.has_given_up = True
            return
        pause_s = (
            0.0 if self._num_failures < 2 else min(INITIAL_BACKOFF_S * 2 ** (self._num_failures - 2), MAX_BACKOFF_S)
        )
        log.error("the runtime process ended; it is started again in %g s", pause_s)
        if self._closing.wait(pause_s):
            return
        self._started_at = time.monotonic()
        try:
            runtime = self._start()
        except PlaitError as error:
            log.error("the runtime did not start: %s", error)
            return
        self._runtime, self.num_restarts = runtime, self.num_restarts + 1
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed, and the server with it
                loop.call_soon_threadsafe(self._join_later, loop, runtime)
        self._started_at = time.monotonic()
        log.warning("the runtime runs again after %.1f s", self._started_at - began)
        if self._closing.is_set():
            runtime.shutdown()
