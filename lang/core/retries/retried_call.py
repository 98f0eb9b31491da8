"""`RetriedCall`: the calls of one gen whose value is checked, as one call. A refused value makes it ask again.

All attempts run in one session, a fork of the program's text, so the prefix is cached. A value is checked when its call
has ended, in a thread of a small pool: no reader is needed for the program to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from plait.lang.budget import BudgetExceeded
from plait.lang.daemon_threads import DaemonThreads
from plait.lang.errors import Attempt
from plait.lang.typed.value_format import RefusedValue
from plait.runtime.call_reports import Usage
from plait.runtime.client.call import Call, CallResult
from plait.runtime.errors import Aborted, CallFailed
from plait.runtime.tokenizer.detokenizer import Detokenizer

if TYPE_CHECKING:
    from plait.runtime.programs.backend import BackendClient, BackendSession

UNKNOWN_TOKEN = -1  # in place of a token of an attempt, whose own call has its id
MAX_CHECKS_AT_A_TIME = 16  # a validator may be slow, and those of other programs must not wait for it
NOT_READ: Any = object()


class RetriedCall(Call):
    """`start(refused)` starts the attempt after the texts that were refused. `read(result)` returns the value of an
    attempt, or raises RefusedValue. `value`: that of the accepted attempt, or NOT_READ. `refused`: the others."""

    def __init__(
        self,
        client: BackendClient,
        timeout_s: float | None,
        max_attempts: int,
        start: Callable[[Sequence[Attempt]], Call],
        read: Callable[[CallResult], Any],
        session: BackendSession,
        on_budget_spent: Callable[[BudgetExceeded], None],
    ) -> None:
        """`session`: that of the attempts, which is closed after the last one. `on_budget_spent`: called before the
        call ends because the budget leaves nothing for another attempt."""
        detokenizer = Detokenizer(client.tokenizer.vocabulary)  # it never gets a token
        super().__init__(client.next_id(), detokenizer, self._end, timeout_s)
        self._max_attempts, self._session = max_attempts, session
        self._start, self._read, self._on_budget_spent = start, read, on_budget_spent
        self._current: Call | None = None
        self._num_attempts = 0  # attempts, with the current one
        self._num_counted = 0  # tokens of the current attempt that are counted in `_token_ids`
        self._checked: Call | None = None  # the last attempt whose check has begun
        self._metas: list[dict[str, Any]] = []
        self._usages: list[Usage] = []
        self.value: Any = NOT_READ
        self.refused: list[Attempt] = []

    def begin(self) -> None:
        """Starts the first attempt. Raises what `start` raises."""
        try:
            first = self._start(())
        except Exception as error:
            self._fail(Aborted(str(error)))  # the program, which has the call already, does not wait for it
            raise
        self._follow(first)

    def text_so_far(self) -> str:
        """Returns the text of the current attempt that has arrived."""
        with self._lock:
            current = None if self.done() else self._current
        return super().text_so_far() if current is None else current.text_so_far()

    # -- attempts ---------------------------------------------------------------------------------

    def _follow(self, call: Call | None) -> None:
        """Follows an attempt, and those after it while they have ended already. The end of another one continues."""
        while call is not None:
            with self._lock:
                self._current, self._num_counted, self._num_attempts = call, 0, self._num_attempts + 1
                is_ended = self.done()
            if is_ended:  # aborted or expired before this attempt was known
                call.abort()
                return
            call.add_listener(partial(self._on_update, call))
            self._count_tokens(call)
            if not call.done() or not self._begin_check(call):
                return
            call = self._after(call)

    def _on_update(self, call: Call) -> None:
        self._count_tokens(call)
        if call.done() and self._begin_check(call):
            _threads().submit(lambda: self._follow(self._after(call)))  # the caller holds the lock of the call

    def _count_tokens(self, call: Call) -> None:
        """Counts the tokens of an attempt as tokens of this call, for budgets and for readers of progress."""
        num_tokens = call.num_tokens  # before the lock, since the caller may hold the lock of the attempt
        with self._lock:
            if self.done() or call is not self._current or num_tokens <= self._num_counted:
                return
            self._token_ids.extend([UNKNOWN_TOKEN] * (num_tokens - self._num_counted))
            self._num_counted = num_tokens
            self._notify()

    def _begin_check(self, call: Call) -> bool:
        """Whether the caller is the first to see the end of the attempt, and so the one to check it."""
        with self._lock:
            is_first = self._checked is not call
            self._checked = call
            return is_first

    def _after(self, call: Call) -> Call | None:
        """Checks a finished attempt. Returns the next one, or None at the end."""
        try:
            result = call.result()
            reason = self._reason_to_refuse(result)
            self._record(result, reason)
            if reason is not None:
                self.refused.append(Attempt(result.text, reason))
                if len(self.refused) < self._max_attempts:
                    return None if self.done() else self._start(self.refused)
            self._finish(result)
        except CallFailed as error:
            self._fail(error)
        except BudgetExceeded as error:
            self._on_budget_spent(error)
            self._fail(Aborted(str(error)))
        except Exception as error:  # of any class: whoever waits for this call must be answered
            self._fail(CallFailed(f"the gen could not be asked again: {error!r:.200}"))
        return None

    def _reason_to_refuse(self, result: CallResult) -> str | None:
        try:
            self.value = self._read(result)
        except RefusedValue as refusal:
            return refusal.short_reason
        except Exception:  # a fault of the validator: the text is kept, and a read of the value raises it again
            return None
        return None

    def _record(self, result: CallResult, reason: str | None) -> None:
        usage = {name: getattr(result.usage, name) for name in Usage.__struct_fields__}
        self._usages.append(result.usage)
        self._metas.append({"text": result.text, "error": reason, "finish_reason": result.finish_reason, **usage})

    def _finish(self, result: CallResult) -> None:
        extra_meta = (result.extra_meta or {}) | self._extra_meta()
        retried = replace(result, usage=_sum(self._usages), extra_meta=extra_meta)
        self._session.close()
        with self._lock:
            if not self.done():
                self._pieces = [result.text]
                self._result = retried
                self._notify()

    def _extra_meta(self) -> dict[str, Any]:
        """Returns what the meta info has beside that of the last attempt."""
        return {"attempts": self._metas}

    def _fail(self, error: CallFailed) -> None:
        self._session.close()
        self.on_failed(error)

    def _end(self) -> None:
        """Ends the call in another thread: the caller may hold the lock of this call or of an attempt."""
        _threads().submit(self._end_now)

    def _end_now(self) -> None:
        self.on_failed(Aborted("the call was aborted"))
        self._session.abort()


def _sum(usages: Sequence[Usage]) -> Usage:
    """Returns the sums. The time to the first token is that of the first attempt."""
    sums = {name: sum(getattr(usage, name) for usage in usages) for name in Usage.__struct_fields__}
    return Usage(**sums | {"ttft_s": usages[0].ttft_s})


@cache
def _threads() -> DaemonThreads:
    """Threads that check values and start the next attempts; none of them waits for a call."""
    return DaemonThreads(MAX_CHECKS_AT_A_TIME, "plait retries")
