"""The engines of several models behind one server: each starts when it is asked for, and leaves when room is needed.

All methods run in the event loop; engines start and end in threads. A model that is asked for and not loaded waits for
room in the order of the first requests. Room is made by the least recently used model: at once if it has no requests,
otherwise it takes no new ones and leaves when its running ones have ended. So no request is ended for another one, and
none waits for ever: new requests of the leaving model wait behind those for which it leaves.

Lines of batches come after requests: they load a model where there is room, and only a model that has had no request
for BATCH_AFTER_S leaves for them. Such a line waits as long as its batch may.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from plait.runtime.errors import DeadlineExceeded, ModelNotFound, PlaitError, RuntimeGone
from plait.runtime.executor.host_machine import trim_heap
from plait.runtime.server.engines.model_spec import ModelSpec
from plait.runtime.server.engines.pooled_model import Engine, PooledModel
from plait.runtime.server.engines.replicated_runtime import shut_down_all
from plait.runtime.server.engines.start import start_engine
from plait.runtime.server.errors import NO_RETRY, OVERLOADED, ApiError
from plait.runtime.server.settings import ServerSettings

MAX_WAIT_S = 600.0  # of a request for its model
BATCH_AFTER_S = 60.0  # without requests, until a model may leave for lines of batches
StartEngine = Callable[..., Engine]

log = logging.getLogger("plait.server")


class EnginePool:
    """The models of one server, in the order of the models file.

    keep: how many engines there may be at once. keep_bytes: what their models may count together
    (`ModelSpec.num_bytes`); a model that exceeds it alone is loaded alone. keep_alive_s: how long a model stays loaded
    without requests, None for as long as there is room. start: starts one engine, as `start_engine` does. on_load:
    called with each model that was loaded.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        server_settings: ServerSettings,
        keep: int,
        keep_bytes: int | None = None,
        keep_alive_s: float | None = None,
        start: StartEngine = start_engine,
    ) -> None:
        self.keep, self.keep_bytes = keep, keep_bytes
        self._server_settings, self._start = server_settings, start
        self.models = [
            PooledModel(spec, server_settings, 0 if keep_bytes is None else spec.num_bytes, keep_alive_s)
            for spec in specs
        ]
        self.on_load: Callable[[PooledModel], None] = lambda model: None
        self._wanted: list[PooledModel] = []  # have waiting requests and no engine, in the order of the first ones
        self._batch_timer: asyncio.TimerHandle | None = None  # until a model may leave for lines of batches
        self._is_closing = self._refuses_batches = False

    # -- requests ---------------------------------------------------------------------------------

    async def acquire(
        self,
        model: PooledModel,
        timeout_s: float | None = None,
        is_background: bool = False,
        queue_time_s: float = math.inf,
    ) -> None:
        """Waits until `model` is loaded, and keeps it so until `release`. is_background: for a line of a batch.

        queue_time_s: what is left of `--max-queue-time`. Raises ApiError 503 with the cause if its start fails or
        failed a short time ago, after `queue_time_s`, and after MAX_WAIT_S; DeadlineExceeded after `timeout_s`.
        """
        if model.accepts_requests:
            model.admit(is_background)
            model.stop_timer()
            return
        if model.engine_state == "loaded" and not model.replaces_runtime:
            self._give_up(model)
        if model.is_paused:
            raise model.start_error()
        await self._wait(model, timeout_s, is_background, queue_time_s)

    def release(self, model: PooledModel, is_background: bool = False) -> None:
        """Ends the use of `model` by one request."""
        model.release(is_background)
        if not model.num_running and model.engine_state == "loaded":
            if not model.replaces_runtime:
                self._give_up(model)
            elif model.keep_alive_s == 0 and not model.is_leaving:
                self._unload(model, "its time without requests has passed")
            elif model.keep_alive_s is not None:
                self._unload_later(model, model.keep_alive_s)
        self._advance()

    def set_keep_alive(self, model: PooledModel, seconds: float) -> None:
        """Sets how long `model` stays loaded without requests, until it is unloaded. Infinity: while there is room.

        Has no effect on a model that is not loaded. The time begins now if the model has no requests.
        """
        if model.engine_state in ("unloaded", "unloading"):
            return
        model.keep_alive_s = None if math.isinf(seconds) else seconds
        if model.engine_state != "loaded" or model.num_running:
            return
        model.stop_timer()
        if seconds == 0:
            self._unload(model, "a client asked for it")
        elif model.keep_alive_s is not None:
            self._unload_later(model, seconds)

    def refuse_batches(self) -> None:
        """Fails the lines of batches that wait for a model, since the server shuts down: the next one runs them."""
        self._refuses_batches = True
        for model in self.models:
            model.fail_waiters(model.batch_waiters, _draining)

    async def _wait(
        self, model: PooledModel, timeout_s: float | None, is_background: bool, queue_time_s: float
    ) -> None:
        if is_background and self._refuses_batches:
            raise _draining()
        if is_background and not model.has_waiters:
            log.info("lines of batches wait for the model %s", model.name)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (model.batch_waiters if is_background else model.waiters).append(waiter)
        if model not in self._wanted:
            self._wanted.append(model)
        limit_s = timeout_s if is_background else min(timeout_s or MAX_WAIT_S, MAX_WAIT_S, queue_time_s)
        try:
            self._advance()
            async with asyncio.timeout(limit_s):
                await waiter
        except TimeoutError:
            self._leave_queue(model, waiter, is_background)
            if limit_s == queue_time_s:
                raise model.queue.waited_too_long() from None
            if timeout_s is not None and (is_background or timeout_s <= MAX_WAIT_S):
                text = f"the request took longer than its timeout of {timeout_s:g} s, in which its model was started"
                raise DeadlineExceeded(text) from None
            text = f"there was no room for the model '{model.name}' within {MAX_WAIT_S:g} s: others have requests"
            raise ApiError(503, text, type=OVERLOADED, param="model", code="overloaded", headers=NO_RETRY) from None
        except BaseException:
            self._leave_queue(model, waiter, is_background)
            raise

    def _leave_queue(self, model: PooledModel, waiter: asyncio.Future[None], is_background: bool) -> None:
        """Ends the wait of a request that was cancelled, failed or has waited too long."""
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self.release(model, is_background)  # it was let in at the same moment
            return
        waiter.cancel()
        with contextlib.suppress(ValueError):  # a failed start has removed it
            (model.batch_waiters if is_background else model.waiters).remove(waiter)
        self._advance()

    # -- engines ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Starts the engines that are wanted and have room, and makes room for the first one that has none."""
        if self._is_closing:
            return
        was_leaving = [model for model in self.models if model.is_leaving]
        for model in was_leaving:
            model.is_leaving = False
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None
        self._load_wanted(was_leaving)
        for model in self.models:
            if model.accepts_requests:
                model.admit_waiters()

    def _load_wanted(self, was_leaving: Sequence[PooledModel]) -> None:
        for model in sorted(self._wanted, key=lambda one: not one.has_request_waiters):
            if model.has_waiters and model.engine_state == "unloaded" and not self._has_room(model):
                if model.spec.path.exists():
                    self._make_room(was_leaving, is_for_batch=not model.has_request_waiters)
                    break
                model.fail(ModelNotFound(f"{model.spec.path} is not there any more"))  # no other model leaves for it
            if model.has_waiters and model.engine_state == "unloading":
                break
            self._wanted.remove(model)
            if model.has_waiters and model.engine_state == "unloaded":
                self._load(model)

    def _has_room(self, model: PooledModel) -> bool:
        others = [other for other in self.models if other.engine_state != "unloaded"]
        num_bytes = model.num_bytes + sum(other.num_bytes for other in others)
        fits = self.keep_bytes is None or not others or num_bytes <= self.keep_bytes
        return fits and len(others) < self.keep

    def _make_room(self, was_leaving: Sequence[PooledModel], is_for_batch: bool) -> None:
        """Unloads the least recently used model without requests. If all have some, one begins to leave.

        is_for_batch: only models without requests for BATCH_AFTER_S leave, also if lines of batches use them.
        """
        if any(model.engine_state == "unloading" for model in self.models):
            return  # then there may be room
        loaded = [model for model in self.models if model.engine_state == "loaded"]
        if is_for_batch:
            loaded = [model for model in loaded if not model.num_requests and not model.has_request_waiters]
            now, free_at = time.monotonic(), {model.name: model.last_request + BATCH_AFTER_S for model in loaded}
            if loaded and (wait_s := min(free_at.values()) - now) > 0:
                self._batch_timer = asyncio.get_running_loop().call_later(wait_s, self._advance)
            loaded = [model for model in loaded if free_at[model.name] <= now]
        if not loaded:
            return  # all others are being started, or are not free
        in_use = {model.name: (model.num_running > 0, model.num_requests > 0) for model in loaded}
        model = min(loaded, key=lambda one: (in_use[one.name], one not in was_leaving, one.last_used))
        if model.num_running:
            model.is_leaving = True
        else:
            self._unload(model, "another model needs its place")

    def _load(self, model: PooledModel) -> None:
        """Starts the engine of a model in a thread, which is a daemon: an interrupted start ends with this process."""
        model.engine_state = "loading"
        log.info("the model %s is started", model.name)
        began, loop = time.monotonic(), asyncio.get_running_loop()

        def start() -> None:
            outcome: Engine | BaseException
            try:
                outcome = self._start(model.spec.model, self._server_settings, model.spec.settings, name=model.name)
            except BaseException as error:
                outcome = error
            try:
                loop.call_soon_threadsafe(self._on_started, model, outcome, began)
            except RuntimeError:  # the loop is closed: the server has ended
                if not isinstance(outcome, BaseException):
                    outcome.shutdown()

        threading.Thread(target=start, name=f"plait-start-{model.name}", daemon=True).start()

    def _on_started(self, model: PooledModel, outcome: Engine | BaseException, began: float) -> None:
        if not isinstance(outcome, BaseException) and not self._is_closing:
            outcome = self._attach(model, outcome)
        if isinstance(outcome, BaseException):
            model.engine_state = "unloaded"
            model.fail(outcome)
            unexpected = None if isinstance(outcome, PlaitError) else outcome
            log.error("the model %s could not be started: %s", model.name, outcome, exc_info=unexpected)
        elif self._is_closing:
            model.engine_state = "unloaded"
            threading.Thread(target=outcome.shutdown, daemon=True).start()
        else:
            self.on_load(model)
            took_s, pid = time.monotonic() - began, outcome.client.model.server_pid
            log.info("the model %s is loaded after %.1f s, process %d", model.name, took_s, pid)
            model.admit_waiters()
            if not model.num_running and model.keep_alive_s is not None:
                self._unload_later(model, model.keep_alive_s)
        self._advance()

    def _attach(self, model: PooledModel, engine: Engine) -> Engine | BaseException:
        """Gives `model` an engine that has started. Returns the error if its runtime has ended already."""
        try:
            engine.attach_to_loop()
            model.set_engine(engine)
        except PlaitError as error:
            threading.Thread(target=engine.shutdown, daemon=True).start()
            return error
        return engine

    def _unload(self, model: PooledModel, reason: str) -> None:
        """Ends the engine of a model without requests, in a thread."""
        log.info("the model %s is unloaded: %s", model.name, reason)
        engine, loop = model.take_engine(), asyncio.get_running_loop()
        engine.detach_from_loop()

        def end() -> None:
            try:
                engine.shutdown()
                trim_heap()
            except Exception:  # the model is unloaded all the same: others wait for its place
                log.exception("the engine of the model %s did not end as it should", model.name)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._on_unloaded, model)

        threading.Thread(target=end, name=f"plait-end-{model.name}").start()

    def _on_unloaded(self, model: PooledModel) -> None:
        model.engine_state = "unloaded"
        if model.has_waiters and model not in self._wanted:
            self._wanted.append(model)
        self._advance()

    def _unload_later(self, model: PooledModel, seconds: float) -> None:
        model.stop_timer()
        model.unload_at = time.monotonic() + seconds
        model.unload_timer = asyncio.get_running_loop().call_later(seconds, self._on_idle_timeout, model)

    def _on_idle_timeout(self, model: PooledModel) -> None:
        model.stop_timer()
        if model.engine_state == "loaded" and not model.num_running:
            self._unload(model, "its time without requests has passed")

    def _give_up(self, model: PooledModel) -> None:
        """Ends an engine whose runtime did not stay up. Its requests fail for a while, and then it is started anew."""
        if model.failure is None:
            model.fail(RuntimeGone("its runtime process did not stay up; see the server's log"))
        if not model.num_running:
            self._unload(model, "its runtime did not stay up")

    # -- the server -------------------------------------------------------------------------------

    def attach_to_loop(self) -> None:
        """Does nothing: the running event loop does the I/O of each engine from when it is loaded."""

    def detach_from_loop(self) -> None:
        """Detaches all engines from the event loop, and starts no more engines. Call it before the loop is closed."""
        self._is_closing = True
        if self._batch_timer is not None:
            self._batch_timer.cancel()
        for model in self.models:
            model.stop_timer()
            if model.engine is not None:
                model.engine.detach_from_loop()

    def shutdown(self) -> None:
        """Ends all engines, side by side. Idempotent."""
        self._is_closing = True
        shut_down_all([model.engine for model in self.models if model.engine is not None])


def _draining() -> ApiError:
    return ApiError(503, "the server is shutting down", type=OVERLOADED, code="draining")
