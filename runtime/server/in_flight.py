"""The requests that are being answered: one record each, from its first byte to its last.

A record is found from anywhere below its request by `current()`: the middleware sets it, `running` notes its sessions
and calls in it, and an error its code.

Knows: records and their counts. Must not know: ASGI, JSON, what metrics or logs make of a record.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from plait.runtime.client.call import Call
from plait.runtime.client.session import Session
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Usage

_current: ContextVar[Record | None] = ContextVar("plait_request", default=None)
DRAINED = "draining"


class Started(Protocol):
    """Sessions and calls that belong together: a `running.Run`."""

    @property
    def sessions(self) -> list[Session]: ...
    @property
    def calls(self) -> list[Call]: ...


@dataclass(eq=False)
class Record:
    """One request. Times are of `time.monotonic()`.

    `tenant`: the name of its API key. `route`: the path's template; "other" for paths that are no route's. `code`: of
    the error it was answered with. `is_work`: it counts against the limits, as `num_calls` calls that run at once.
    `claim(calls)`: asks for room for so many calls, and raises where there is none.
    """

    method: str
    path: str
    request_id: str = ""
    their_id: str = ""
    trace_id: str = ""
    tenant: str = ""
    route: str = "other"
    status: int = 0
    code: str | None = None
    began: float = field(default_factory=time.monotonic)
    first_byte: float | None = None
    ended: float | None = None
    client_gone: bool = False
    is_work: bool = False
    num_calls: int = 0
    claim: Callable[[int], None] = lambda calls: None
    body_start: bytes = b""
    task: asyncio.Task[object] | None = None
    runs: list[Started] = field(default_factory=list)

    @property
    def sessions(self) -> list[Session]:
        """What the request has opened in the runtime."""
        return [session for run in self.runs for session in run.sessions]

    @property
    def calls(self) -> list[Call]:
        """What it has asked of the runtime."""
        return [call for run in self.runs for call in run.calls]

    @property
    def wall_s(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    @property
    def num_tokens(self) -> int:
        """Of all answers, so far."""
        return sum(call.num_tokens for call in self.calls)

    def abort(self) -> None:
        """Ends what the request has in the runtime; a request that has nothing there is cancelled."""
        self.code = DRAINED
        sessions = self.sessions
        for session in sessions:
            session.abort()
        if not sessions and self.task is not None:
            self.task.cancel()

    def usages(self) -> Iterator[tuple[Call, Usage]]:
        """The calls that ended with a value, each with its cost."""
        for call in self.calls:
            if (usage := call.usage) is not None and call.failure is None:
                yield call, usage

    def failure(self) -> CallFailed | None:
        """Of the first call that failed."""
        return next((call.failure for call in self.calls if call.failure is not None), None)


def current() -> Record | None:
    """The record of the request that this code runs for; None outside a server."""
    return _current.get()


def enter(record: Record) -> None:
    """Makes `record` the current one of this task and of those it starts."""
    _current.set(record)


class InFlight:
    """All records of one server that are not done."""

    def __init__(self) -> None:
        self.records: set[Record] = set()
        self.num_work = 0
        self.num_calls = 0
        self._of_tenant: Counter[str] = Counter()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def begin_work(self, record: Record) -> None:
        """From now on the request counts, as one call until more is known."""
        record.is_work = True
        self.num_work += 1
        self.widen(record, 1)
        self._of_tenant[record.tenant] += 1
        self._none_left.clear()

    def widen(self, record: Record, calls: int) -> None:
        """The request counts as so many calls."""
        self.num_calls += calls - record.num_calls
        record.num_calls = calls

    def num_of(self, tenant: str) -> int:
        """Requests of one key that count now."""
        return self._of_tenant[tenant]

    def end(self, record: Record) -> None:
        """The request is answered, or its client is gone."""
        self.records.discard(record)
        if record.is_work:
            self.num_work -= 1
            self.widen(record, 0)
            self._of_tenant -= Counter({record.tenant: 1})
            if not self.num_work:
                self._none_left.set()

    async def wait_for_none(self, timeout_s: float) -> bool:
        """Waits until no request counts; False when `timeout_s` passed before."""
        try:
            await asyncio.wait_for(self._none_left.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> int:
        """Aborts every request that counts; how many there were."""
        left = [record for record in self.records if record.is_work]
        for record in left:
            record.abort()
        return len(left)
