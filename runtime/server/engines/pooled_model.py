"""One model of an `EnginePool`: the state of its engine, its waiting requests, and its last failed start."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from plait.runtime.errors import PlaitError
from plait.runtime.messages import Welcome
from plait.runtime.server.engines.model_spec import ModelSpec
from plait.runtime.server.engines.replicated_runtime import ReplicatedRuntime
from plait.runtime.server.engines.restarting_runtime import RestartingRuntime
from plait.runtime.server.engines.served_model import ModelStatus, ServedModel
from plait.runtime.server.errors import INTERNAL, ApiError
from plait.runtime.server.http.call_queue import CallQueue
from plait.runtime.server.settings import ServerSettings

INITIAL_PAUSE_S, MAX_PAUSE_S = 5.0, 60.0  # after a failed start; doubled with each further one

Engine = RestartingRuntime | ReplicatedRuntime


@dataclass(frozen=True)
class StartFailure:
    """Why the last start failed, and when a request may cause the next one. count: failed starts in a row."""

    cause: str
    count: int
    retry_at: float


class PooledModel(ServedModel):
    """A model whose engine is started and ended by an `EnginePool`.

    num_running: requests and lines of batches that use the engine now; num_requests: without lines. waiters,
    batch_waiters: futures of those that wait for it. last_used: by any of them; last_request: by a request. is_leaving:
    it takes no more requests, and is unloaded when the running ones have ended. keep_alive_s: how long it stays loaded
    without requests, None for as long as there is room; a client may change it until the model is unloaded. unload_at:
    when that ends. Times are values of `time.monotonic()`.
    """

    def __init__(
        self, spec: ModelSpec, settings: ServerSettings, num_bytes: int = 0, keep_alive_s: float | None = None
    ) -> None:
        self.spec, self.num_bytes, self.keep_alive_s = spec, num_bytes, keep_alive_s
        self._default_keep_alive_s = keep_alive_s
        self.engine_state: Literal["unloaded", "loading", "loaded", "unloading"] = "unloaded"
        self.num_running = self.num_requests = 0
        self.is_leaving, self.last_used, self.last_request = False, 0.0, -math.inf
        self.waiters: deque[asyncio.Future[None]] = deque()
        self.batch_waiters: deque[asyncio.Future[None]] = deque()
        self.unload_timer: asyncio.TimerHandle | None = None
        self.unload_at: float | None = None
        self.failure: StartFailure | None = None
        self.engine: Engine | None = None
        self.num_starts = self.num_failed_starts = 0
        self._info: Welcome | None = None
        self._template_source = ""
        super().__init__(settings, CallQueue(settings), None)

    @property
    def name(self) -> str:
        """The name in the models file."""
        return self.spec.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """See `ServedModel`."""
        return self.spec.aliases

    @property
    def adapters(self) -> tuple[str, ...]:
        """See `ServedModel`."""
        return tuple(self.spec.settings.get("adapters") or ())

    @property
    def info(self) -> Welcome | None:
        """What the engine reported when it was last loaded; None if it never was."""
        return self._info

    @property
    def template_source(self) -> str:
        """The chat template of the engine when it was last loaded; "" without one."""
        return self._template_source

    @property
    def status(self) -> ModelStatus:
        """The state of the engine. "failed": it is not loaded, since its last start failed."""
        if self.engine_state == "loaded":
            return super().status
        return "failed" if self.engine_state == "unloaded" and self.failure is not None else self.engine_state

    @property
    def may_have_replicas(self) -> bool:
        """Whether the engine, loaded or not, has replicas."""
        return self.spec.settings.get("replicas") is not None

    @property
    def accepts_requests(self) -> bool:
        """Whether a request can use the engine at once."""
        return self.engine_state == "loaded" and not self.is_leaving and self.replaces_runtime

    @property
    def is_paused(self) -> bool:
        """Whether the last start failed and the next one may not begin yet."""
        return self.failure is not None and time.monotonic() < self.failure.retry_at

    @property
    def has_request_waiters(self) -> bool:
        """Whether a request waits for the engine."""
        return any(not waiter.done() for waiter in self.waiters)

    @property
    def has_waiters(self) -> bool:
        """Whether a request or a line of a batch waits for the engine."""
        return self.has_request_waiters or any(not waiter.done() for waiter in self.batch_waiters)

    def admit(self, is_background: bool) -> None:
        """Lets a request use the engine, which is loaded."""
        self.num_running += 1
        self.num_requests += not is_background
        self._note_use(is_background)

    def release(self, is_background: bool) -> None:
        """Ends the use by a request."""
        self.num_running -= 1
        self.num_requests -= not is_background
        self._note_use(is_background)

    def _note_use(self, is_background: bool) -> None:
        self.last_used = time.monotonic()
        self.last_request = self.last_request if is_background else self.last_used

    def admit_waiters(self) -> None:
        """Lets all that wait use the engine, which is loaded."""
        for is_background, waiters in ((False, self.waiters), (True, self.batch_waiters)):
            while waiters:
                waiter = waiters.popleft()
                if not waiter.done():
                    self.admit(is_background)
                    waiter.set_result(None)

    def set_engine(self, engine: Engine) -> None:
        """Takes an engine that has started. Raises RuntimeGone if its runtime has ended."""
        client = engine.client  # may raise, before anything has changed
        self.backend = self.engine = engine
        self.engine_state, self.failure = "loaded", None
        self.num_starts, self.last_used = self.num_starts + 1, time.monotonic()
        self._info = client.model
        template = client.tokenizer.chat_template
        self._template_source = template.source if template is not None else ""
        self.queue.set_max_running(client.model.max_batch_rows)

    def take_engine(self) -> Engine:
        """Returns the engine, which is to be ended."""
        engine, self.engine, self.backend = self.engine, None, None
        assert engine is not None
        self.engine_state, self.is_leaving = "unloading", False
        self.keep_alive_s = self._default_keep_alive_s
        self.stop_timer()
        return engine

    def stop_timer(self) -> None:
        """Ends the time without requests."""
        if self.unload_timer is not None:
            self.unload_timer.cancel()
        self.unload_timer = self.unload_at = None

    def fail(self, error: BaseException) -> None:
        """Notes a failed start, and fails all requests that wait for it."""
        count = 1 if self.failure is None else self.failure.count + 1
        cause = str(error) if isinstance(error, PlaitError) else "an internal error; see the server's log"
        pause_s = min(INITIAL_PAUSE_S * 2 ** min(count - 1, 10), MAX_PAUSE_S)
        self.failure = StartFailure(cause, count, time.monotonic() + pause_s)
        self.num_failed_starts += 1
        for waiters in (self.waiters, self.batch_waiters):
            self.fail_waiters(waiters, self.start_error)

    def fail_waiters(self, waiters: deque[asyncio.Future[None]], error: Callable[[], ApiError]) -> None:
        """Fails those that wait in one of the two queues."""
        while waiters:
            waiter = waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error())

    def start_error(self) -> ApiError:
        """503 with the cause of the last failed start."""
        assert self.failure is not None
        seconds = max(1, math.ceil(self.failure.retry_at - time.monotonic()))
        text = f"the model '{self.name}' could not be started: {self.failure.cause}"
        headers = {"Retry-After": str(seconds)}
        return ApiError(503, text, type=INTERNAL, param="model", code="model_start_failed", headers=headers)
