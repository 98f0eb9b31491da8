"""The client: opens sessions, numbers calls, and hands each reply to the call it is for.

Knows: ids, calls, and the model's tokenizer. Must not know: how messages travel, or what a program is.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

from plait.constrained.specs import Spec
from plait.runtime.client.call import Call, ScoredChoices
from plait.runtime.client.session import Session
from plait.runtime.errors import CallFailed, InputError, PlaitError, RuntimeGone, call_failed
from plait.runtime.messages import (
    MAX_NAME_CHARS,
    MAX_PRIORITY,
    Abort,
    ClientMessage,
    Failed,
    Finished,
    FlushCache,
    Inspect,
    Open,
    ServerMessage,
    Status,
    Tokens,
    Welcome,
)
from plait.runtime.tokenizer.detokenizer import Detokenizer
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from plait.runtime.transport.base import ClientTransport
from plait.runtime.transport.notifier import LoopNotifier

STATUS_TIMEOUT_S = 60.0


class Client:
    """A connection to one scheduler. Threads may share it.

    >>> with Runtime() as runtime:                          # doctest: +SKIP
    ...     session = runtime.client.open_session()
    """

    def __init__(self, transport: ClientTransport, tokenizer: Tokenizer | None = None) -> None:
        self.model: Welcome = transport.welcome
        self.tokenizer = tokenizer or load_tokenizer(Path(self.model.model_path), vocab_size=self.model.vocab_size)
        self._transport = transport
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Call | _StatusRequest] = {}
        self._disconnect_reason: str | None = None
        transport.start(self._on_reply, self._on_disconnect)

    def open_session(
        self, *, tenant: str = "", cache_salt: str = "", priority: int = 0, program: int | None = None
    ) -> Session:
        """An empty session. Sessions given one `program` number share a fairness account."""
        for name in (tenant, cache_salt):
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not name.isprintable():
                raise InputError(
                    f"tenant and cache_salt are printable texts of at most {MAX_NAME_CHARS} characters",
                    field="cache_salt",
                )
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise InputError(f"priority is an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {priority!r:.40}")
        session_id = self.next_id()
        self.send(Open(session_id, tenant, cache_salt, priority, session_id if program is None else program))
        return Session(self, session_id)

    def encode_for_embedding(self, text: str) -> list[int]:
        """The ids of a whole text as the model embeds it, behind the prompt that its files put before every text."""
        made = self.model.embeddings
        return self.tokenizer.encode_with_special_tokens(text, made.prompt if made is not None else "")

    def status(self) -> Status:
        """Counts of sessions, calls and pages in the scheduler now."""
        return self._request_status(Inspect)

    async def astatus(self) -> Status:
        """`status()` for an event loop; waits as long as the runtime lives."""
        changed, notifier = asyncio.Event(), LoopNotifier.for_running_loop()
        call_id, status_request = self.next_id(), _StatusRequest(lambda: notifier.notify(changed))
        self._register(call_id, status_request)
        self.send(Inspect(call_id))
        await changed.wait()
        return status_request.value()

    def flush_cache(self) -> Status:
        """Drops every cached prefix that no running call needs."""
        return self._request_status(FlushCache)

    def attach_to_loop(self) -> None:
        """Reads replies in the running event loop from now on, without a change of thread. For a process that has one
        loop and nothing that blocks it; call it there, and `detach_from_loop` before that loop is closed."""
        self._transport.attach_to_loop()

    def detach_from_loop(self) -> None:
        """Reads in a thread again."""
        self._transport.detach_from_loop()

    def close(self) -> None:
        """Ends this connection; the scheduler frees its sessions. Idempotent."""
        self._transport.close()
        self._on_disconnect("this client was closed")

    @property
    def is_closed(self) -> bool:
        """True once no call can be answered any more: the runtime ended, or this client was closed."""
        return self._disconnect_reason is not None

    # -- for sessions -----------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, request: ClientMessage) -> None:
        self._transport.send(request)

    def send_if_open(self, request: ClientMessage) -> None:
        """For goodbyes: a scheduler that is gone needs none."""
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
        """Numbers a call, sends `request(call id)` and returns the call to wait on, at most `timeout_s` seconds."""
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

    def _register(self, call_id: int, call: Call | _StatusRequest) -> None:
        with self._lock:
            if self._disconnect_reason is not None:
                raise RuntimeGone(self._disconnect_reason)
            self._calls[call_id] = call

    def _on_reply(self, reply: ServerMessage) -> None:
        if isinstance(reply, Welcome):
            return
        if isinstance(reply, Tokens):
            call = self._calls.get(reply.call)
            if isinstance(call, Call):
                call.on_tokens(reply.token_ids, reply.logprobs)
            return
        with self._lock:
            call = self._calls.pop(reply.call, None)
        if isinstance(reply, Failed) and call is not None:
            call.on_failed(call_failed(reply.kind, reply.text))
        elif isinstance(reply, Finished) and isinstance(call, Call):
            call.on_finished(reply)
        elif isinstance(reply, Status) and isinstance(call, _StatusRequest):
            call.on_status(reply)

    def _on_disconnect(self, why: str) -> None:
        with self._lock:
            if self._disconnect_reason is not None:
                return
            self._disconnect_reason = why
            waiting = list(self._calls.values())
            self._calls.clear()
        for call in waiting:
            call.on_failed(RuntimeGone(why))

    def _request_status(self, request: Callable[[int], Inspect | FlushCache]) -> Status:
        call_id, status_request = self.next_id(), _StatusRequest()
        self._register(call_id, status_request)
        self.send(request(call_id))
        with status_request.changed:
            if not status_request.changed.wait_for(status_request.done, STATUS_TIMEOUT_S):
                raise RuntimeGone(f"the runtime did not answer within {STATUS_TIMEOUT_S:.0f} s")
        return status_request.value()


class _StatusRequest:
    """A question about the scheduler, waiting for its Status."""

    def __init__(self, listener: Callable[[], None] = lambda: None) -> None:
        self.changed = threading.Condition()
        self._listener = listener
        self._status: Status | None = None
        self._error: PlaitError | None = None

    def done(self) -> bool:
        return self._status is not None or self._error is not None

    def on_status(self, status: Status) -> None:
        with self.changed:
            self._status = status
            self.changed.notify_all()
        self._listener()

    def on_failed(self, error: CallFailed) -> None:
        with self.changed:
            self._error = error
            self.changed.notify_all()
        self._listener()

    def value(self) -> Status:
        if self._error is not None:
            raise self._error
        assert self._status is not None
        return self._status
