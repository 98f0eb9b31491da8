"""Restarts the runtime process when it dies or does not answer, so that the server in front of it keeps running.

The rule of restarts of all kinds of servers: the first restart follows at once, the next ones after a pause that
doubles up to `MAX_BACKOFF_S`. A runtime that has run for `STABLE_AFTER_S` begins a new row. After `max_restarts`
restarts in a row, failed ones included, there is no further one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.runtime.errors import InputError, ModelError, NotRestarted, PlaitError
from plait.runtime.process.runtime import Runtime
from plait.runtime.server.settings import MAX_RESTARTS, STUCK_AFTER_S

if TYPE_CHECKING:
    from plait.runtime.client.client import Client

POLL_INTERVAL_S = 0.1  # each poll takes some 0.1 ms of a processor that streams use
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.5, 5.0
STABLE_AFTER_S = 60.0  # from the moment when a runtime is ready
LIVENESS_INTERVAL_S = 0.5  # a check follows each interval without replies
NOT_READY_AFTER_S = 3.5  # without an answer to a check

log = logging.getLogger("plait.server")


class RestartingRuntime:
    """A `Runtime` that is replaced when it dies, or has not answered for `stuck_after_s`, by a background thread.

    The first one starts in the constructor, which raises what `Runtime` raises; `meanwhile` is called while it loads.
    `settings` are those of `Runtime`. `num_restarts` counts replacements; after `max_restarts` in a row there are no
    more.
    on_start: called with each runtime that has started; an error that it raises makes it a failed start.
    on_unresponsive: called twice a second while a runtime has not answered for NOT_READY_AFTER_S. Both are called in
    the thread, on_start first in that of the constructor. name: in the log.
    """

    def __init__(
        self,
        model_path: str | None = None,
        meanwhile: Callable[[], object] | None = None,
        stuck_after_s: float = STUCK_AFTER_S,
        max_restarts: int = MAX_RESTARTS,
        on_start: Callable[[Runtime], None] = lambda runtime: None,
        on_unresponsive: Callable[[], None] = lambda: None,
        name: str = "the runtime",
        **settings: Any,
    ) -> None:
        self._model_path, self._settings, self._stuck_after_s = model_path, settings, stuck_after_s
        self._on_start, self._on_unresponsive, self.name = on_start, on_unresponsive, name
        self._loaded_paths = set[str]()  # of adapters that were not among the first runtime's
        self._runtime = self._start(meanwhile)
        self._ready_at = time.monotonic()
        self._max_restarts, self._num_in_a_row, self.num_restarts = max_restarts, 0, 0
        self._end_reason: str | None = None  # why there will be no further runtime
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._watch, name="plait-restart", daemon=True)
        self._thread.start()

    @property
    def client(self) -> Client:
        """The client of the current runtime. While that is replaced, it is closed, but still has model and tokenizer.

        Raises NotRestarted once no further runtime will be started.
        """
        if self._end_reason is not None:
            raise NotRestarted(self._end_reason)
        return self._runtime.client

    @property
    def has_given_up(self) -> bool:
        """Whether the runtime has ended, and no further one will be started."""
        return self._end_reason is not None

    @property
    def address(self) -> str:
        """The directory of the current runtime, as `Runtime.address`."""
        return self._runtime.address

    def keep_adapter(self, name: str, path: str | None) -> None:
        """Gives an adapter to the runtimes that replace this one, if its file is there; None takes it from them."""
        others = {other: kept for other, kept in (self._settings.get("adapters") or {}).items() if other != name}
        self._settings = {**self._settings, "adapters": others if path is None else {**others, name: path}}
        if path is not None:
            self._loaded_paths.add(path)

    def attach_to_loop(self) -> None:
        """Lets the running event loop do the I/O of this runtime and its replacements. Call it in that loop."""
        self._loop = asyncio.get_running_loop()
        self._runtime.client.attach_to_loop()

    def detach_from_loop(self) -> None:
        """Undoes `attach_to_loop`. Call it before the loop is closed."""
        self._loop = None
        self._runtime.client.detach_from_loop()

    def shutdown(self) -> None:
        """Stops the runtime and the restarts. Idempotent."""
        self._closing.set()
        self._runtime.shutdown()

    def _attach_if_current(self, loop: asyncio.AbstractEventLoop, runtime: Runtime) -> None:
        """Runs in `loop`, which may have been detached since the call was scheduled."""
        if self._loop is loop:
            runtime.client.attach_to_loop()

    def _start(self, meanwhile: Callable[[], object] | None = None) -> Runtime:
        settings = {"progress": self._log_progress, **self._settings}
        if self._loaded_paths:
            adapters = settings["adapters"].items()
            settings["adapters"] = {
                name: path for name, path in adapters if path not in self._loaded_paths or Path(path).exists()
            }
        runtime = self._start_with_fewer(settings, meanwhile)
        runtime.client.set_liveness_check(LIVENESS_INTERVAL_S, self._stuck_after_s)
        try:
            self._on_start(runtime)
        except BaseException:
            runtime.shutdown(grace_s=0.0)
            raise
        return runtime

    def _start_with_fewer(self, settings: dict[str, Any], meanwhile: Callable[[], object] | None) -> Runtime:
        """Starts without those loaded adapters that cannot be read any more. Raises what starting raises."""
        while True:
            try:
                return Runtime(self._model_path, meanwhile=meanwhile, **settings)
            except (InputError, ModelError) as error:
                adapters = settings.get("adapters") or {}
                loaded = {name: path for name, path in adapters.items() if path in self._loaded_paths}
                named = [name for name, path in loaded.items() if repr(name) in str(error) or path in str(error)]
                if not loaded:
                    raise
                log.error("%s does not start with an adapter that was loaded: %s", self.name, error)
                left_out = named or loaded
                settings = {**settings, "adapters": {name: adapters[name] for name in adapters if name not in left_out}}

    def _log_progress(self, text: str) -> None:
        log.info("%s starts: %s", self.name, text)

    def _watch(self) -> None:
        was_answering, next_report = True, 0.0
        while not self._closing.wait(POLL_INTERVAL_S):
            client = self._runtime.client
            if client.is_closed:
                self._replace()
            elif was_answering != (client.unanswered_s < NOT_READY_AFTER_S):
                was_answering = not was_answering
                state = "answers again" if was_answering else f"has not answered for {NOT_READY_AFTER_S:g} s"
                log.warning("%s %s", self.name, state)
            if not was_answering and time.monotonic() >= next_report:
                next_report = time.monotonic() + LIVENESS_INTERVAL_S
                self._on_unresponsive()
            if self.has_given_up:
                return

    def _replace(self) -> None:
        """Makes one attempt to start a runtime, after the backoff."""
        died_at = time.monotonic()
        self._runtime.shutdown(grace_s=0.0)  # it has ended, or does not answer
        if self._closing.is_set():
            return
        if died_at - self._ready_at > STABLE_AFTER_S:
            self._num_in_a_row = 0
        reason, num_before = self._runtime.client.disconnect_reason, self._num_in_a_row
        if num_before >= self._max_restarts:
            limit = f"the limit of restarts in a row is reached (--max-restarts {self._max_restarts})"
            self._end_reason = f"the model's runtime process has ended, and {limit}; see the server's log"
            log.error("%s; %s is not restarted: %s", reason, self.name, limit)
            return
        self._num_in_a_row += 1
        pause_s = min(INITIAL_BACKOFF_S * 2 ** min(num_before - 1, 10), MAX_BACKOFF_S) if num_before else 0.0
        log.error("%s; %s is restarted in %g s", reason, self.name, pause_s)
        if self._closing.wait(pause_s):
            return
        self._ready_at = math.inf  # if it does not start
        try:
            runtime = self._start()
        except Exception as error:  # also OSError: without memory, descriptors or space on the disk nothing starts
            log.error("%s did not start: %s", self.name, error, exc_info=not isinstance(error, PlaitError | OSError))
            return
        self._runtime, self.num_restarts = runtime, self.num_restarts + 1
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._attach_if_current, loop, runtime)
        self._ready_at = time.monotonic()
        log.warning("%s is up again after %.1f s", self.name, self._ready_at - died_at)
        if self._closing.is_set():
            runtime.shutdown()
