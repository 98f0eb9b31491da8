"""The client: opens sessions, assigns ids, and dispatches each reply to its call."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from plait.constrained.specs import Spec
from plait.runtime.client.call import Call, ScoredChoices
from plait.runtime.client.session import Session, check_adapter
from plait.runtime.errors import CLIENT_CLOSED, CallFailed, InputError, PlaitError, RuntimeGone, call_failed
from plait.runtime.messages import (
    MAX_NAME_CHARS,
    MAX_PRIORITY,
    Abort,
    BlockBatch,
    BlockSnapshot,
    ClientMessage,
    Failed,
    Finished,
    FlushCache,
    Inspect,
    LoadAdapter,
    Open,
    ServerMessage,
    Status,
    Tokens,
    UnloadAdapter,
    Welcome,
)
from plait.runtime.tokenizer.detokenizer import Detokenizer
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from plait.runtime.transport.base import ClientTransport

STATUS_TIMEOUT_S = 60.0


def server_info(model: Welcome, status: Status) -> dict[str, Any]:
    """Returns the counters of a runtime and its model, as a dict."""
    info = msgspec.structs.asdict(model) | msgspec.structs.asdict(status)
    return {name: value for name, value in info.items() if name not in ("call", "protocol")}


class Client:
    """A connection to one scheduler. Thread-safe.

    >>> with Runtime() as runtime:                          # doctest: +SKIP
    ...     session = runtime.client.open_session()
    """

    takes_following_text = True
    takes_token_ids = True

    def __init__(self, transport: ClientTransport, tokenizer: Tokenizer | None = None) -> None:
        self.model: Welcome = transport.welcome
        self.tokenizer = tokenizer or load_tokenizer(Path(self.model.model_path), vocab_size=self.model.vocab_size)
        if self.model.chat_template:
            self.tokenizer.replace_chat_template(self.model.chat_template)
        self._transport = transport
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Call | Future[Status]] = {}  # a future of an Inspect, FlushCache or change of adapters
        self._disconnect_reason: str | None = None
        transport.start(self._on_reply, self._on_disconnect)

    def open_session(
        self,
        *,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        program: int | None = None,
        background: bool = False,
        adapter: str = "",
    ) -> Session:
        """Opens an empty session.

        Sessions with equal `tenant` and `cache_salt` share cached prefixes. Sessions with the same `program` number
        count as one program in fair scheduling; None makes the session a separate program. The calls of a `background`
        session run behind all others. `adapter`: the name of the adapter that computes the session's text; "" is the
        model alone. Raises InputError.
        """
        for name in (tenant, cache_salt):
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not name.isprintable():
                raise InputError(
                    f"tenant and cache_salt are printable texts of at most {MAX_NAME_CHARS} characters",
                    field="cache_salt",
                )
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise InputError(f"priority is an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {priority!r:.40}")
        check_adapter(adapter, self.model)
        session_id = self.next_id()
        program = session_id if program is None else program
        self.send(Open(session_id, tenant, cache_salt, priority, program, background, adapter))
        return Session(self, session_id)

    def encode_for_embedding(self, text: str) -> list[int]:
        """Returns the ids of a text to embed, with the model's default prompt and its special tokens."""
        info = self.model.embeddings
        return self.tokenizer.encode_with_special_tokens(text, info.prompt if info is not None else "")

    def status(self) -> Status:
        """Returns the scheduler's current counts. Raises RuntimeGone."""
        return self._wait_for_status(Inspect)

    def server_info(self) -> dict[str, Any]:
        """Returns the current counters of the runtime and its model."""
        return server_info(self.model, self.status())

    async def astatus(self) -> Status:
        """`status()` for an event loop; waits without a time limit while the runtime is alive."""
        return await self._await_status(Inspect)

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Adds an adapter, an absolute path of a folder or file; it is in `model.adapters` then.

        replace: whether another adapter may have the name; sessions that have that one keep it. Raises CallRejected for
        an adapter that cannot be used, and RuntimeGone.
        """
        await self._await_status(lambda call_id: LoadAdapter(call_id, name, path, replace))

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter from `model.adapters`; sessions that have it keep it. Raises CallRejected, RuntimeGone."""
        await self._await_status(lambda call_id: UnloadAdapter(call_id, name))

    async def _await_status(self, request: Callable[[int], ClientMessage]) -> Status:
        return await asyncio.wrap_future(self._ask_status(request))

    def flush_cache(self, tenant: str | None = None) -> Status:
        """Evicts every cached prefix of `tenant` (None: of all tenants) that no running call uses."""
        return self._wait_for_status(lambda call_id: FlushCache(call_id, tenant))

    def attach_to_loop(self) -> None:
        """Receives replies in the running event loop from now on, instead of in a thread.

        For a process with one event loop that is never blocked. Call it in that loop, and call `detach_from_loop`
        before the loop is closed.
        """
        self._transport.attach_to_loop()

    def detach_from_loop(self) -> None:
        """Receives replies in a thread again."""
        self._transport.detach_from_loop()

    def set_liveness_check(self, interval_s: float, unresponsive_after_s: float) -> None:
        """Checks after each `interval_s` seconds of silence that the runtime answers.

        The client gives up after `unresponsive_after_s` seconds without an answer: waiting calls raise RuntimeGone.
        """
        self._transport.set_liveness_check(interval_s, unresponsive_after_s)

    def close(self) -> None:
        """Disconnects; the scheduler drops the sessions of this client, and waiting calls raise RuntimeGone.

        Idempotent.
        """
        self._transport.close()
        self._on_disconnect(CLIENT_CLOSED)

    @property
    def is_closed(self) -> bool:
        """Whether the runtime has ended or this client was closed."""
        return self._disconnect_reason is not None

    @property
    def disconnect_reason(self) -> str | None:
        """Why nothing more can be sent or received; None while the client is connected."""
        return self._disconnect_reason

    @property
    def unanswered_s(self) -> float:
        """For how long the runtime has not answered a liveness check, in seconds. 0 if none is open."""
        return self._transport.unanswered_s

    # -- used by sessions -------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, request: ClientMessage) -> None:
        self._transport.send(request)

    def send_if_open(self, request: ClientMessage) -> None:
        """Sends a message that ends something. Does nothing if the scheduler has ended."""
        if self._disconnect_reason is None:
            try:
                self._transport.send(request)
            except RuntimeGone:
                return

    def start_call(
        self,
        session_id: int,
        request: Callable[[int], ClientMessage],
        timeout_s: float | None,
        lenient_constraint: Spec | None = None,
        scored_choices: ScoredChoices | None = None,
    ) -> Call:
        """Assigns a call id, sends `request(call_id)` and returns the call, which fails after `timeout_s` seconds.

        Raises RuntimeGone after the end of the connection, InputError for a message that is too large.
        """
        call_id = self.next_id()
        abort = Abort(session_id, call_id)
        detokenizer = Detokenizer(self.tokenizer.vocabulary)
        call = Call(
            call_id, detokenizer, lambda: self.send_if_open(abort), timeout_s, lenient_constraint, scored_choices
        )
        self._register(call_id, call)
        try:
            self.send(request(call_id))
        except PlaitError:
            with self._lock:
                self._calls.pop(call_id, None)
            raise
        return call

    # -- replies ----------------------------------------------------------------------------------

    def _register(self, call_id: int, call: Call | Future[Status]) -> None:
        with self._lock:
            if self._disconnect_reason is not None:
                raise RuntimeGone(self._disconnect_reason)
            self._calls[call_id] = call

    def _on_reply(self, reply: ServerMessage) -> None:
        if isinstance(reply, (Welcome, BlockBatch, BlockSnapshot)):  # no answers to calls
            if isinstance(reply, Welcome):  # after a change of its adapters
                self.model = reply
            return
        with self._lock:
            call = self._calls.get(reply.call) if isinstance(reply, Tokens) else self._calls.pop(reply.call, None)
        if call is None:  # it has ended here already
            return
        try:
            self._dispatch(call, reply)
        except Exception as error:  # values that cannot be: the other calls of this client go on
            with self._lock:
                self._calls.pop(reply.call, None)
            text = f"the runtime's reply could not be read ({type(error).__name__}: {error!s:.200})"
            _fail(call, CallFailed(text))

    def _dispatch(self, call: Call | Future[Status], reply: Tokens | Finished | Failed | Status) -> None:
        if isinstance(reply, Tokens) and isinstance(call, Call):
            call.on_tokens(reply.token_ids, reply.logprobs)
        elif isinstance(reply, Finished) and isinstance(call, Call):
            call.on_finished(reply)
        elif isinstance(reply, Failed):
            _fail(call, call_failed(reply.kind, reply.text, reply.where))
        elif isinstance(reply, Status) and isinstance(call, Future):
            call.set_result(reply)
        else:
            raise TypeError(f"a {type(reply).__name__} is not the answer to this call")

    def _on_disconnect(self, reason: str) -> None:
        with self._lock:
            if self._disconnect_reason is not None:
                return
            self._disconnect_reason = reason
            waiting = list(self._calls.values())
            self._calls.clear()
        for call in waiting:
            _fail(call, RuntimeGone(reason))

    def _wait_for_status(self, request: Callable[[int], ClientMessage]) -> Status:
        try:
            return self._ask_status(request).result(STATUS_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeGone(f"the runtime did not answer within {STATUS_TIMEOUT_S:.0f} s") from None

    def _ask_status(self, request: Callable[[int], ClientMessage]) -> Future[Status]:
        call_id, status = self.next_id(), Future[Status]()
        status.set_running_or_notify_cancel()  # a caller that no longer waits does not cancel it
        self._register(call_id, status)
        self.send(request(call_id))
        return status


def _fail(call: Call | Future[Status], error: CallFailed) -> None:
    if isinstance(call, Call):
        call.on_failed(error)
    else:
        call.set_exception(error)
