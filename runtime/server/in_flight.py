"""Records of the requests in flight, which limits, metrics, logs and traces read.

`RequestContextMiddleware` creates a request's record. Code that runs for the request finds it with `current_request()`:
`generation/submission.py` adds its sessions and calls, and an error response its code.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from plait.runtime.call_reports import Usage
from plait.runtime.client.call import Call
from plait.runtime.client.session import Session
from plait.runtime.errors import CallFailed, DeadlineExceeded

if TYPE_CHECKING:
    from plait.runtime.server.engines.served_model import ServedModel
    from plait.runtime.server.http.call_queue import Place

_current_request: ContextVar[RequestRecord | None] = ContextVar("plait_request", default=None)
DRAINED = "draining"


class CallGroup(Protocol):
    """Sessions and calls of a request, such as a `generation.submission.RequestHandle`."""

    @property
    def sessions(self) -> list[Session]: ...
    @property
    def calls(self) -> list[Call]: ...
    def abort(self) -> None:
        """Ends all sessions at once. Every call that still runs fails."""


class RequestSize(NamedTuple):
    """How a request counts against the limits.

    num_rows: that its calls (its prompts times its choices) can occupy in a batch, with `particles` or `exact` several
    each. num_key_requests: of its key: one, or with `particles` its rows.
    """

    num_rows: int
    num_key_requests: int = 1


@dataclass(eq=False)
class RequestRecord:
    """One request. Times are values of `time.monotonic()`.

    tenant: the name of its API key. route: the path's template; "other" for a path without a route. code: the code of
    its error response. is_admitted: it counts against the limits: as the calls of its `place` against the capacity, and
    as `num_key_requests` requests against the limit of its key. reserve_calls(size): counts it with that size, or
    raises ApiError if it exceeds a limit. reserve_program(n): the same for a program of n calls, which also count
    against the limit of its key. is_background: it is a line of a batch, which counts against no limit and runs behind
    all other requests. num_runs: one more for each time that it was run again because its runtime ended. model: where
    it runs; None until that is known. adapter: the name of the one that computes it; "" is the model alone. place: in
    the model's queue; None until its body has arrived. wait_s: for its model and its turn. num_body_bytes: that have
    arrived and wait. on_end: called when it has ended. start_deadline: by which its calls must end, from its own
    timeout. warnings: of its fields, text -> "advice" or "unknown"; see `request_warnings.py`. strict_fields: these are
    errors. wants_cache_miss: its answer has a `CacheMissReport`. session_id: the client's own id of the conversation
    that it belongs to, for logs and spans. before_reading: called in a thread when its first tokens are there, so that
    its constraint was compiled: what reading the answer needs.
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
    is_background: bool = False
    num_key_requests: int = 0
    reserve_calls: Callable[[RequestSize], None] = lambda size: None
    reserve_program: Callable[[int], None] = lambda num_calls: None
    body_preview: bytes = b""
    task: asyncio.Task[object] | None = None
    handles: list[CallGroup] = field(default_factory=list)
    num_runs: int = 1
    deadline: float = math.inf  # the earliest of its calls, over all runs
    start_deadline: float = math.inf
    model: ServedModel | None = None
    adapter: str = ""
    place: Place | None = None
    wait_s: float = 0.0
    num_body_bytes: int = 0
    on_end: list[Callable[[], None]] = field(default_factory=list)
    before_reading: Callable[[], None] | None = None
    warnings: dict[str, str] = field(default_factory=dict)
    strict_fields: bool = False
    wants_cache_miss: bool = False
    session_id: str = ""

    def begin_next_run(self) -> None:
        """Forgets the calls of the last run, whose runtime ended. What they reserved is kept for the next one."""
        self.num_runs += 1
        if self.handles:
            self.handles.clear()
            self.reserve_calls = lambda size: None
            self.reserve_program = lambda num_calls: None

    def limit_timeout(self, timeout_s: float | None) -> float | None:
        """Returns the timeout of a call that begins now: what is left after a wait, and in a further run.

        Raises DeadlineExceeded if nothing is left.
        """
        if timeout_s is None:
            return None
        now = time.monotonic()
        if self.num_runs == 1:
            deadline = self.start_deadline if self.wait_s else math.inf
            self.deadline = min(self.deadline, now + timeout_s, deadline)
        else:
            deadline = self.deadline
        if deadline <= now:
            raise DeadlineExceeded(f"the request took longer than its timeout of {timeout_s:g} s")
        return min(timeout_s, deadline - now)

    @property
    def sessions(self) -> list[Session]:
        """The sessions that the request opened in the runtime."""
        return [session for handle in self.handles for session in handle.sessions]

    @property
    def calls(self) -> list[Call]:
        """The calls that the request made to the runtime."""
        return [call for handle in self.handles for call in handle.calls]

    @property
    def awaited_calls(self) -> list[Call]:
        """`calls`, and those that compute logprobs of prompts."""
        scoring = [call for handle in self.handles for call in getattr(handle, "prompt_scoring_calls", ())]
        return [*self.calls, *(call for call in scoring if call is not None)]

    @property
    def wall_s(self) -> float:
        """Seconds from the request's start to its end, or until now."""
        return (self.end_time or time.monotonic()) - self.start_time

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far, over all calls."""
        return sum(call.num_tokens for call in self.calls)

    def abort(self) -> None:
        """Ends the request's wait, or aborts its sessions in the runtime. Cancels its task if it has neither."""
        self.code = DRAINED
        if self.place is not None and self.place.end_wait("the server is shutting down", DRAINED):
            return
        for handle in self.handles:
            handle.abort()
        if not self.sessions and self.task is not None:
            self.task.cancel()

    def usages(self) -> Iterator[tuple[Call, Usage]]:
        """Yields the calls that succeeded, with their usage."""
        for call in self.calls:
            if (usage := call.usage) is not None and call.failure is None:
                yield call, usage

    def failure(self) -> CallFailed | None:
        """The failure of the first call that failed."""
        return next((call.failure for call in self.calls if call.failure is not None), None)


def current_request() -> RequestRecord | None:
    """The record of the request that the current task works for; None outside a server."""
    return _current_request.get()


def set_current_request(record: RequestRecord) -> None:
    """Makes `record` the current request of this task and of the tasks it starts."""
    _current_request.set(record)


class InFlightRequests:
    """The records of one server's unfinished requests, and counts over the admitted ones."""

    def __init__(self) -> None:
        self.records: set[RequestRecord] = set()
        self.num_admitted = 0
        self._num_by_tenant: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def admit(self, record: RequestRecord) -> None:
        """Starts to count the request."""
        record.is_admitted = True
        self.num_admitted += 1
        self.set_num_key_requests(record, 0 if record.is_background else 1)
        self._idle.clear()

    def set_num_key_requests(self, record: RequestRecord, num_requests: int) -> None:
        """Counts the request as `num_requests` requests of its key."""
        self._num_by_tenant[record.tenant] += num_requests - record.num_key_requests
        record.num_key_requests = num_requests
        if not self._num_by_tenant[record.tenant]:
            del self._num_by_tenant[record.tenant]

    def num_of_tenant(self, tenant: str) -> int:
        """The number of admitted requests of one API key. A program counts as the calls that it can have at once."""
        return self._num_by_tenant[tenant]

    def end(self, record: RequestRecord) -> None:
        """Removes a request that was answered or whose client has disconnected."""
        self.records.discard(record)
        while record.on_end:
            record.on_end.pop()()
        if record.is_admitted:
            self.num_admitted -= 1
            self.set_num_key_requests(record, 0)
            if not self.num_admitted:
                self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no admitted request is left. Returns False after `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> int:
        """Aborts every admitted request. Returns how many there were."""
        admitted = [record for record in self.records if record.is_admitted]
        for record in admitted:
            record.abort()
        return len(admitted)
