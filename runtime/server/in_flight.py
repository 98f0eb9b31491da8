"""The requests that are being answered: one record each, from its first byte to its last.

A record is found from anywhere below its request by `current_request()`: the middleware sets it, `running` notes its sessions
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

_current_request: ContextVar[RequestRecord | None] = ContextVar("plait_request", default=None)
DRAINED = "draining"


class CallGroup(Protocol):
    """Sessions and calls that belong together: a `running.Run`."""

    @property
    def sessions(self) -> list[Session]: ...
    @property
    def calls(self) -> list[Call]: ...


@dataclass(eq=False)
class RequestRecord:
    """One request. Times are of `time.monotonic()`.

    `tenant`: the name of its API key. `route`: the path's template; "other" for paths that are no route's. `code`: of
    the error it was answered with. `is_admitted`: it counts against the limits, as `num_calls` calls that run at once.
    `reserve_calls(calls)`: asks for room for so many calls, and raises where there is none.
    """

    method: str
    path: str
    request_id: str = ""
    client_request_id: str = ""
    trace_id: str = ""
    tenant: str = ""
    route: str = "other"
    status: int = 0
    code: str | None = None
    start_time: float = field(default_factory=time.monotonic)
    first_byte_time: float | None = None
    end_time: float | None = None
    client_gone: bool = False
    is_admitted: bool = False
    num_calls: int = 0
    reserve_calls: Callable[[int], None] = lambda calls: None
    body_preview: bytes = b""
    task: asyncio.Task[object] | None = None
    handles: list[CallGroup] = field(default_factory=list)

    @property
    def sessions(self) -> list[Session]:
        """What the request has opened in the runtime."""
        return [session for run in self.handles for session in run.sessions]

    @property
    def calls(self) -> list[Call]:
        """What it has asked of the runtime."""
        return [call for run in self.handles for call in run.calls]

    @property
    def wall_s(self) -> float:
        return (self.end_time or time.monotonic()) - self.start_time

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


def current_request() -> RequestRecord | None:
    """The record of the request that this code runs for; None outside a server."""
    return _current_request.get()


def set_current_request(record: RequestRecord) -> None:
    """Makes `record` the current one of this task and of those it starts."""
    _current_request.set(record)


class InFlightRequests:
    """All records of one server that are not done."""

    def __init__(self) -> None:
        self.records: set[RequestRecord] = set()
        self.num_admitted = 0
        self.num_calls = 0
        self._of_tenant: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def admit(self, record: RequestRecord) -> None:
        """From now on the request counts, as one call until more is known."""
        record.is_admitted = True
        self.num_admitted += 1
        self.set_num_calls(record, 1)
        self._of_tenant[record.tenant] += 1
        self._idle.clear()

    def set_num_calls(self, record: RequestRecord, calls: int) -> None:
        """The request counts as so many calls."""
        self.num_calls += calls - record.num_calls
        record.num_calls = calls

    def num_of_tenant(self, tenant: str) -> int:
        """Requests of one key that count now."""
        return self._of_tenant[tenant]

    def end(self, record: RequestRecord) -> None:
        """The request is answered, or its client is gone."""
        self.records.discard(record)
        if record.is_admitted:
            self.num_admitted -= 1
            self.set_num_calls(record, 0)
            self._of_tenant -= Counter({record.tenant: 1})
            if not self.num_admitted:
                self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request counts; False when `timeout_s` passed before."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> int:
        """Aborts every request that counts; how many there were."""
        left = [record for record in self.records if record.is_admitted]
        for record in left:
            record.abort()
        return len(left)
