"""A runtime process that is started again when it dies, so that the server in front of it stays.

Knows: `launch.Runtime` and when to try again. Must not know: HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError, RuntimeGone
from plait.runtime.launch import Runtime

LOOK_EVERY_S = 0.25
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

log = logging.getLogger("plait.server")


class RestartingRuntime:
    """Settings are those of `Runtime`. Starts one at once and raises what that raises; a thread replaces it later.

    `num_restarts` counts the replacements.
    """

    def __init__(self, model_path: str | None = None, **settings: Any) -> None:
        self._model_path, self._settings = model_path, settings
        self._runtime = self._start()
        self.num_restarts = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="plait-restart", daemon=True)
        self._thread.start()

    @property
    def client(self) -> Client:
        """The client of the runtime that lives. Raises RuntimeGone while there is none."""
        client = self._runtime.client
        if client.is_gone:
            raise RuntimeGone("the runtime process has ended and is being started again")
        return client

    def shutdown(self) -> None:
        """Ends the runtime. Idempotent."""
        self._closing.set()
        self._runtime.shutdown()

    def _start(self) -> Runtime:
        return Runtime(self._model_path, **self._settings)

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.wait(LOOK_EVERY_S):
            if not self._runtime.client.is_gone:
                continue
            began = time.monotonic()
            self._runtime.shutdown()
            log.error("the runtime process ended; starting it again")
            try:
                runtime = self._start()
            except PlaitError as error:
                log.error("the runtime did not start (%s); trying again in %g s", error, pause_s)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self._runtime, self.num_restarts, pause_s = runtime, self.num_restarts + 1, FIRST_PAUSE_S
            log.warning("the runtime runs again after %.1f s", time.monotonic() - began)
            if self._closing.is_set():
                runtime.shutdown()
