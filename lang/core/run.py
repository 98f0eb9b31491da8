"""`Run`: what all states of one program run share: its sessions and calls, its error and its end.

A program waits only here or in a call, and every wait ends: with the end of the body, or of the call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from plait.lang.budget import Budget, BudgetExceeded, BudgetTracker
from plait.lang.errors import ProgramError, program_error
from plait.lang.sampling_options import Options
from plait.runtime.errors import Aborted, DeadlineExceeded, InputError

if TYPE_CHECKING:
    from plait.lang.core.results import CallSegment
    from plait.runtime.client.deferred_session import DeferredSession
    from plait.runtime.programs.backend import BackendClient, BackendSession
    from plait.runtime.sampling_params import SamplingParams
    from plait.runtime.tokenizer.chat_template import ChatTemplate

S = TypeVar("S", bound="BackendSession")


run_listeners: list[Callable[[Run], None]] = []
"""Called with every run that begins; used to collect traces."""


class Run:
    """The sessions, calls and result of one `program.run(...)`."""

    def __init__(self, program: str, client: BackendClient, defaults: Options, budget: Budget | None = None) -> None:
        self.program = program
        self.client = client
        self.defaults = defaults
        self.adapter = defaults.adapter  # of calls that name none
        self.ended = False  # the body has returned or raised
        self.error: ProgramError | None = None
        self.ret_value: Any = None
        self.arguments: Mapping[str, Any] = {}  # of the program, by the names of its parameters
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._call_segments: list[CallSegment] = []
        self._program_id = client.next_id()
        self._sessions: dict[int, BackendSession] = {}
        self._unreferenced_sessions: deque[BackendSession] = deque()
        self._handled_causes: list[BaseException] = []
        self._detached: set[int] = set()
        self.started_s = time.monotonic()
        self.branch_parents: list[int | None] = []  # for each branch, the number of its parent branch
        self.ended_branches: dict[int, str] = {}  # why branches were ended before their end
        self.aborted = False  # by its reader, its budget, or after a failure
        self.budget_tracker = None if budget is None else BudgetTracker(budget, self._on_budget_spent)
        self.chat_template = self._template_of(client)
        self._notify_run_listeners()

    def _template_of(self, client: BackendClient) -> ChatTemplate | None:
        """The chat template of this run's turns. Raises InputError for variables that it does not read."""
        template: ChatTemplate | None = client.tokenizer.chat_template
        variables = self.defaults.template_variables
        if template is None and variables:
            raise InputError("chat_template_kwargs: this model has no chat template")
        return template.with_variables(variables) if template is not None and variables else template

    def _notify_run_listeners(self) -> None:
        for listener in run_listeners:
            listener(self)

    def check_has_run(self) -> None:
        """Raises InputError while the program is compiled, when nothing runs."""

    # -- sessions and calls -----------------------------------------------------------------------

    def open_session(self) -> BackendSession:
        """Opens a session. The scheduler's fairness counts all sessions of this run as one program."""
        session = self.client.open_session(program=self._program_id)
        if self.adapter:
            session, empty = session.fork(1, self.adapter)[0], session
            empty.close()
        return self.register_session(session)

    def register_session(self, session: S) -> S:
        """Registers `session` to be closed at the end, and closes those whose states were garbage-collected.

        Raises Aborted once the program was aborted.
        """
        while self._unreferenced_sessions:
            self.close(self._unreferenced_sessions.popleft())
        if self.aborted:
            session.close()
            raise Aborted("the program was ended")
        self._sessions[id(session)] = session
        return session

    def deferred(self, session: BackendSession) -> DeferredSession:
        """Replaces a session by one whose instructions can wait for the text of calls, unless it is one already.

        Raises Aborted once the program was aborted.
        """
        from plait.runtime.client.deferred_session import DeferredSession  # lazy: it imports the tokenizer

        if isinstance(session, DeferredSession):
            return session
        self._sessions.pop(id(session), None)
        return self.register_session(DeferredSession(self.client, session))

    def close(self, session: BackendSession) -> None:
        """Closes one session; its calls run to their end."""
        self._sessions.pop(id(session), None)
        session.close()

    def new_branch_id(self, parent: int | None) -> int:
        """Returns the number of a new branch whose parent is branch `parent`."""
        self.branch_parents.append(parent)
        return len(self.branch_parents) - 1

    def abort_session(self, session: BackendSession) -> None:
        """Aborts one session and its calls."""
        self._sessions.pop(id(session), None)
        session.abort()

    def detach(self, call_segments: Sequence[CallSegment]) -> None:
        """Excludes these calls from the final wait. If they fail, the program does not."""
        self._detached.update(map(id, call_segments))

    def close_later(self, session: BackendSession) -> None:
        """Marks `session` as unreachable. It is closed later, since the garbage collector may be the caller."""
        self._unreferenced_sessions.append(session)

    def add(self, call_segment: CallSegment) -> None:
        """Registers a call of this program."""
        self._call_segments.append(call_segment)
        if self.budget_tracker is not None:
            self.budget_tracker.count_tokens(call_segment.call)
        if self.aborted:  # meanwhile, by another thread
            call_segment.call.abort()

    def limited_params(self, params: SamplingParams, ends_at: float | None, too_late: str) -> SamplingParams:
        """Returns the parameters of one of several calls that are a gen together: with the time that is left until
        `ends_at` (by time.monotonic()), and within the budget. Raises DeadlineExceeded with the text `too_late`."""
        if ends_at is not None:
            seconds_left = ends_at - time.monotonic()
            if seconds_left <= 0:
                raise DeadlineExceeded(too_late)
            params = msgspec.structs.replace(params, timeout_s=seconds_left)
        return params if self.budget_tracker is None else self.budget_tracker.limit_params(params)

    def call_segments(self) -> list[CallSegment]:
        return list(self._call_segments)

    def progress(self) -> Literal["running", "done", "failed", "cancelled"]:
        """Returns what the program does now. Does not wait."""
        if self.error is not None:
            return "cancelled" if isinstance(self.error.__cause__, Aborted) else "failed"
        if not self.ended or not all(call_segment.call.done() for call_segment in self.call_segments()):
            return "running"
        missed = (call.call.failure for call in self.call_segments() if id(call) not in self._detached)
        return "cancelled" if self.aborted and any(isinstance(failure, Aborted) for failure in missed) else "done"

    # -- waiting ----------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wakes all waiters; called on new text, on a new variable and at the end."""
        with self._changed:
            self._changed.notify_all()
            for listener in self._listeners:
                listener()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()` is true or the body has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended or ready())

    def wait_for_end(self) -> None:
        """Waits for the end of the body, however it ends."""
        self.wait(lambda: False)

    async def wait_async(self, ready: Callable[[], bool]) -> None:
        """`wait` for an event loop; does not block a thread."""
        import asyncio

        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._listeners.append(wake)
        try:
            while True:
                with self._changed:
                    if self.ended or ready():
                        return
                    changed.clear()
                await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(wake)

    async def wait_for_end_async(self) -> None:
        """`wait_for_end` for an event loop."""
        await self.wait_async(lambda: False)

    def wait_and_raise(self) -> None:
        """Waits for every call. Raises the first failure that the body has not handled."""
        for call_segment in self.call_segments():
            if id(call_segment) in self._detached:
                continue
            failure = call_segment.failure()
            if failure is not None and not any(self._is_handled(sample) for sample in call_segment.siblings):
                raise failure

    async def wait_and_raise_async(self) -> None:
        """`wait_and_raise` for an event loop."""
        for call_segment in self.call_segments():
            await call_segment.wait_finished()
        self.wait_and_raise()

    def _is_handled(self, call_segment: CallSegment) -> bool:
        failure = call_segment.failure()
        return failure is not None and any(failure.__cause__ is cause for cause in self._handled_causes)

    def mark_handled(self, error: ProgramError) -> None:
        """Records that a read in the body raised `error`. If the body continues, it has handled it."""
        if error.__cause__ is not None:
            self._handled_causes.append(error.__cause__)

    def _on_budget_spent(self, error: BudgetExceeded) -> None:
        self.fail(program_error(self.program, None, error))

    # -- the end ----------------------------------------------------------------------------------

    def fail(self, error: ProgramError) -> None:
        """Stores `error`, which every later read raises, and aborts what still runs. The first error wins."""
        if self.error is None:
            self.error = error
        elif error.steps:  # of an agent that a spent budget ended
            self.error.steps, self.error.messages = error.steps, error.messages
        self.abort()

    def raise_if_failed(self) -> None:
        """Raises the program's error, if it failed."""
        if self.error is not None:
            raise self.error.copy_to_raise() from self.error.__cause__

    def end(self) -> None:
        """Marks the end of the body: sessions are released after their calls, and waits for new text end."""
        for session in list(self._sessions.values()):
            self.close(session)
        self.ended = True
        self.notify()

    def abort(self) -> None:
        """Aborts every call and session, and refuses new ones. May be called from any thread."""
        self.aborted = True
        for call_segment in self.call_segments():
            call_segment.call.abort()
        for session in list(self._sessions.values()):
            self._sessions.pop(id(session), None)
            session.abort()
