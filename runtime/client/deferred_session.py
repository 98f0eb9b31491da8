"""`DeferredSession`: a session to which text is appended that other calls still generate; nobody waits for it.

Instructions after such text are kept in order, and are given to the session when the text is known. Their calls exist
at once, so a program goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Protocol

from plait.constrained.specs import Spec
from plait.runtime.client.call import Call
from plait.runtime.client.session import check_fork_size
from plait.runtime.client.stream import ReadPosition
from plait.runtime.errors import Aborted, CallFailed, InputError, PlaitError, call_failed
from plait.runtime.messages import SelectMethod
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.detokenizer import Detokenizer


class DeferringClient(Protocol):
    """What a deferred session uses of its client."""

    @property
    def tokenizer(self) -> Any: ...
    def next_id(self) -> int: ...


class DeferredCall(Call):
    """A call that is started later. It repeats what the started call receives."""

    def __init__(self, client: DeferringClient, timeout_s: float | None) -> None:
        detokenizer = Detokenizer(client.tokenizer.vocabulary)  # it never gets a token
        super().__init__(client.next_id(), detokenizer, self._end, timeout_s)
        self._started: Call | None = None
        self._position = ReadPosition()

    def start(self, call: Call) -> None:
        """Repeats `call` from now on."""
        with self._lock:
            self._started, self.scored_choices = call, call.scored_choices
            was_ended = self.done()
        if was_ended:
            call.abort()
            return
        call.add_listener(self._repeat)
        self._repeat()

    def _repeat(self) -> None:
        call = self._started
        assert call is not None
        is_done = call.done()
        with call._lock, self._lock:  # in the order of a listener, which is called with the lock of the call
            if self.done():
                return
            update, self._position = call.read_since(self._position)
            self._token_ids.extend(update.token_ids)
            if update.text:
                self._pieces.append(update.text)
            if is_done:
                self._error = call.failure
                self._result = call.result(0) if self._error is None else None
            self._notify()

    def _end(self) -> None:
        """Ends the call in another thread: the caller may hold the lock of this call or of the started one."""
        _threads().submit(self._end_now)

    def _end_now(self) -> None:
        with self._lock:
            started = self._started
        if started is None:
            self.on_failed(Aborted("the call was aborted"))
        else:
            started.abort()


class DeferredSession:
    """A session, with the instructions that wait. `session` is None until the fork that opens it was made."""

    def __init__(self, client: DeferringClient, session: Any = None) -> None:
        self._client = client
        self._session = session
        self._queue: deque[_Instruction] = deque()
        self._lock = threading.Lock()
        self._is_busy = False  # a thread runs an instruction
        self._is_closed = False
        self._waited: Call | None = None  # the call whose end continues the queue
        self._failed: CallFailed | None = None
        self._name: str | None = None  # of the variable of the next call

    def set_next_call_name(self, name: str | None) -> None:
        """Sets the variable of the next call, for the sessions that take names."""
        self._name = name

    def append(self, text: str, *, control: bool = False) -> None:
        self._add(_Instruction(lambda: self._session.append(text, control=control)))

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        self._add(_Instruction(lambda: self._session.append_tokens(token_ids)))

    def append_later(self, calls: Sequence[Call], parts: Callable[[], Sequence[tuple[str, bool]]]) -> None:
        """Appends the texts of `parts()`, each with whether control tokens in it count, which are known when the calls
        have ended. If one of them fails, so do all later calls."""

        def append() -> None:
            for text, control in parts():
                self._session.append(text, control=control)

        self._add(_Instruction(append, tuple(calls)))

    def generate(self, params: SamplingParams, constraint: Spec | None = None, trailing_text: str = "") -> Call:
        return self._begin(params.timeout_s, lambda: self._session.generate(params, constraint, trailing_text))

    def select(
        self,
        choices: Sequence[str],
        method: SelectMethod = "token_length_normalized",
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> Call:
        return self._begin(timeout_s, lambda: self._session.select(choices, method, timeout_s, seed))

    def fork(self, size: int, adapter: str | None = None) -> list[DeferredSession]:
        check_fork_size(size)
        children = [DeferredSession(self._client) for _ in range(size)]

        def open_children() -> None:
            for child, session in zip(children, self._session.fork(size, adapter), strict=True):
                child._open(session)

        def fail_children(error: CallFailed) -> None:
            for child in children:
                child._fail(error)

        self._add(_Instruction(open_children, on_failed=fail_children))
        return children

    def abort(self) -> None:
        """Ends the session and its calls, also those that wait. Idempotent."""
        self._is_closed = True
        self._fail(Aborted("the call was aborted"))
        if self._session is not None:
            self._session.abort()

    def close(self) -> None:
        """Ends the session when its calls are done. Idempotent."""
        if not self._is_closed:
            self._add(_Instruction(self._close_session, on_failed=lambda error: self._close_session()))
            self._is_closed = True

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()

    # -- order ------------------------------------------------------------------------------------

    def _begin(self, timeout_s: float | None, start: Callable[[], Call]) -> Call:
        call, name = DeferredCall(self._client, timeout_s), self._name

        def start_unless_ended() -> None:
            if call.done():  # aborted, or its timeout passed, while it waited
                raise call.failure or Aborted("the call was aborted")
            self._session.set_next_call_name(name)
            call.start(start())

        def fail(error: CallFailed) -> None:
            call.on_failed(error if isinstance(error, Aborted) else _following(error))

        self._add(_Instruction(start_unless_ended, on_failed=fail))
        return call

    def _add(self, instruction: _Instruction) -> None:
        if self._is_closed:
            raise InputError("this session is closed")
        with self._lock:
            self._queue.append(instruction)
        self._advance()

    def _open(self, session: Any) -> None:
        with self._lock:
            self._session, is_ended = session, self._failed is not None
        if is_ended:
            session.abort()
        self._advance()

    def _fail(self, error: CallFailed) -> None:
        with self._lock:
            self._failed = self._failed or error
        self._advance()

    def _advance(self) -> None:
        """Runs the instructions whose text is known, one at a time and in order."""
        while (found := self._next()) is not None:
            instruction, failed = found
            try:
                self._run(instruction, failed)
            finally:
                with self._lock:
                    self._is_busy = False

    def _next(self) -> tuple[_Instruction, CallFailed | None] | None:
        """Takes the next instruction that can run. Returns None if there is none now; its call's end continues."""
        while True:
            with self._lock:
                can_run = self._session is not None or self._failed is not None
                if self._is_busy or not self._queue or not can_run:
                    return None
                awaited = next((call for call in self._queue[0].calls if not call.done()), None)
                if awaited is None or self._failed is not None:
                    self._is_busy = True
                    return self._queue.popleft(), self._failed
                if awaited is self._waited:
                    return None
                self._waited = awaited
            awaited.add_listener(partial(self._on_update, awaited))
            if not awaited.done():
                return None

    def _on_update(self, awaited: Call) -> None:
        if awaited.done():
            _threads().submit(self._advance)  # the caller holds the lock of the call

    def _run(self, instruction: _Instruction, failed: CallFailed | None) -> None:
        if failed is not None:
            instruction.on_failed(failed)
            return
        try:
            instruction.run()
        except Exception as error:  # of any class: calls that wait for it must end
            failed = _as_call_failed(error)
            with self._lock:
                self._failed = self._failed or failed
            instruction.on_failed(failed)


class _Instruction:
    """`run` is called when all `calls` have ended; `on_failed` instead, if an instruction before it failed."""

    def __init__(
        self,
        run: Callable[[], None],
        calls: tuple[Call, ...] = (),
        on_failed: Callable[[CallFailed], None] = lambda error: None,
    ) -> None:
        self.run, self.calls, self.on_failed = run, calls, on_failed


def _as_call_failed(error: Exception) -> CallFailed:
    """Returns the failure of a call for an error of an instruction; a ProgramError of a text has it as its cause."""
    cause = error if isinstance(error, CallFailed) else error.__cause__
    if isinstance(cause, CallFailed):
        return cause
    return call_failed("invalid", str(error)) if isinstance(error, PlaitError) else CallFailed(repr(error))


def _following(error: CallFailed) -> CallFailed:
    prefix = "the session cannot continue after a failed call: "
    return call_failed(error.kind, prefix + str(error).removeprefix(prefix))


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads that start and end calls; none of these waits for a call."""
    return ThreadPoolExecutor(2, thread_name_prefix="plait deferred")
