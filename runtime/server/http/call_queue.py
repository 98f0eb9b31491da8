"""The calls of one model by API key: which run, which wait for their turn, and which are refused. It counts, no more.

A request has a place from when its body has arrived until it has ended. It waits for its turn before it opens sessions,
so that one that waits costs no work of the runtime, and a runtime that ends loses none that wait. Keys share both the
places and the turns by weight (`constrained/tenant_shares.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from plait.constrained.tenant_shares import TenantQueue, TenantShares
from plait.runtime.errors import QueueTimeout
from plait.runtime.server.errors import OVERLOADED, ApiError
from plait.runtime.server.settings import ServerSettings

LATE_SHARE = 0.5  # of --max-queue-time: when the oldest request of a key has waited so long, its newest begins first
TIMER_S = 0.002  # by which a timer may fire early
# What runs no call needs no place, and is not refused because calls wait: it would be the way to end them.
WITHOUT_PLACE = frozenset(
    {
        *("/abort_request", "/concate_and_append_request", "/flush_cache"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/api/show"),
    }
)
FOLDERS_WITHOUT_PLACE = ("/v1/files", "/v1/batches")  # their lines are counted by `batches/slots.py`
PARTICLES = "the particles of this request can be"  # of `check_alone`


def needs_place(path: str) -> bool:
    """Whether a request to this path may run calls. A path that no route has may."""
    return path not in WITHOUT_PLACE and not path.startswith(FOLDERS_WITHOUT_PLACE)


@dataclass(eq=False)
class Place:
    """Of one request. num_calls: that it can have in flight. num_rows: that they can occupy in a batch."""

    queue: CallQueue
    key: str
    num_calls: int = 1
    num_rows: int = 1
    arrival_time: float = field(default_factory=time.monotonic)
    has_begun: bool = False
    waiter: asyncio.Future[None] | None = None

    @property
    def latest_begin(self) -> float:
        """When `--max-queue-time` has passed, in monotonic seconds."""
        return self.arrival_time + self.queue.max_queue_time_s if self.queue.max_queue_time_s else math.inf

    async def wait_for_turn(self, deadline: float, at_most_s: float = math.inf) -> None:
        """Returns when the request's calls may start, or after `at_most_s`; it then keeps its place in the line.

        Raises QueueTimeout at `deadline` (monotonic seconds), ApiError 503 after `--max-queue-time`, and what
        `end_wait` says.
        """
        queue, now = self.queue, time.monotonic()
        limit = self.latest_begin
        until = min(deadline, limit, now + at_most_s)
        self.waiter = waiter = asyncio.get_running_loop().create_future()
        queue.put(self)
        try:
            await asyncio.wait({waiter}, timeout=None if until == math.inf else max(0.0, until - now + TIMER_S))
            if waiter.done():
                waiter.result()  # raises what `end_wait` says
            elif until == deadline:
                raise QueueTimeout("the request did not begin within its timeout")
            elif until == limit:
                raise queue.waited_too_long()
        except BaseException:
            queue.discard(self)
            raise
        finally:
            self.waiter = None

    def end_wait(self, text: str, code: str) -> bool:
        """Ends the wait of a request with an error. Returns whether it waited."""
        if self.waiter is None or self.waiter.done():
            return False
        self.waiter.set_exception(self.queue.refused(text, code))
        return True


@dataclass(frozen=True)
class Refusal:
    """Why a request has no place. is_own_share: the key's own requests fill its share, while other keys wait."""

    text: str
    is_own_share: bool = False


class CallQueue:
    """The places of one model. `max_running`: calls that the runtime runs at once."""

    def __init__(self, settings: ServerSettings) -> None:
        self.max_queue, self.max_queue_time_s = settings.max_queue, settings.max_queue_time_s
        self._max_per_key = settings.max_requests_per_key
        self._retry_after = {"Retry-After": str(settings.retry_after_s)}
        self._places = TenantShares(settings.key_weights)  # the units are calls, waiting or running
        self._turns = TenantShares(settings.key_weights)  # the units are rows of requests that have begun
        self._waiting = TenantQueue[Place](self._turns)
        self.num_calls = self.num_rows = 0
        self.set_max_running(settings.max_running)

    def set_max_running(self, max_running: int) -> None:
        """Sets how many calls the runtime runs at once, which is known when it has started."""
        self.max_running = max_running
        # As many again wait in the runtime, which ranks them by priority and cached prefix, and has the next call at
        # hand when one ends. With a limit on the time, none: a wait in the runtime has no such limit.
        self._max_begun = max_running if self.max_queue_time_s else 2 * max_running

    @property
    def capacity(self) -> int:
        """The number of calls that may run or wait at once."""
        return self.max_running + self.max_queue

    @property
    def num_waiting(self) -> int:
        """The requests that wait for their turn."""
        return len(self._waiting)

    def refusal(self, key: str, num_calls: int = 1, num_own: int = 0) -> Refusal | None:
        """Why a request of `key` with `num_calls` calls exceeds its share of the capacity; None if it does not.

        num_own: calls of the request that are counted already.
        """
        if self._places.ahead(key, num_calls - num_own) <= self.capacity:
            return None
        need = f", and this request needs {num_calls}" if num_calls > 1 else ""
        text = f"{self.num_calls - num_own} calls are running or waiting{need}"
        is_own_share = any(name != key for name in self._places.holders())
        if is_own_share:
            text += "; other keys wait, and the requests of this key fill its share"
        return Refusal(text, is_own_share)

    def check_alone(self, num_calls: int, param: str, owner: str) -> None:
        """Raises ApiError 400 if one request would have more calls at once than a key, or than the server."""
        for largest, whose in ((self._max_per_key or num_calls, "one key"), (self.capacity, "this server")):
            if num_calls > largest:
                text = f"{owner} {num_calls} calls in flight at once; {whose} can have {largest}"
                raise ApiError(400, text, param=param, code="too_many_calls")

    def refused(self, text: str, code: str) -> ApiError:
        """503, for a request that waited."""
        return ApiError(503, f"{text}; try again later", type=OVERLOADED, code=code, headers=self._retry_after)

    def waited_too_long(self) -> ApiError:
        """503 after `--max-queue-time`."""
        text = f"the request waited for {self.max_queue_time_s:g} s, the limit of this server (--max-queue-time)"
        return self.refused(text, "queue_full")

    def admit(self, key: str) -> Place:
        """Gives a place to a request whose body has arrived, as one call."""
        place = Place(self, key)
        self.num_calls += 1
        self._places.take(key)
        return place

    def set_size(self, place: Place, num_calls: int, num_rows: int) -> None:
        """Sets how many calls the request can have in flight, and how many rows they occupy."""
        self.num_calls += num_calls - place.num_calls
        self._places.take(place.key, num_calls - place.num_calls)
        if place.has_begun:
            self._count_rows(place.key, num_rows - place.num_rows)
        place.num_calls, place.num_rows = num_calls, num_rows
        self._give_turns()

    def end(self, place: Place) -> None:
        """Takes back the place of a request that was answered or has failed."""
        self.discard(place)
        self.set_size(place, 0, 0)

    # -- turns ------------------------------------------------------------------------------------

    def begin(self, place: Place) -> bool:
        """Gives a request its turn if nobody of its key waits before it. Returns whether it has it."""
        if place.has_begun:
            return True
        if self._waiting.num_of(place.key) or not self._may_begin(place.key):
            return False
        place.has_begun = True
        self._count_rows(place.key, place.num_rows)
        return True

    def put(self, place: Place) -> None:
        """Adds a request to those that wait."""
        self._waiting.put(place.key, place)

    def discard(self, place: Place) -> None:
        """Removes a request from those that wait; does nothing if it does not."""
        self._waiting.discard(place)

    def _count_rows(self, key: str, num_rows: int) -> None:
        self.num_rows += num_rows
        self._turns.take(key, num_rows)

    def _may_begin(self, key: str) -> bool:
        """Whether one more request of `key` may be in the runtime: there is room, or others are above their share."""
        has_room = self.num_rows < self._max_begun or not self._turns.held(key)
        return has_room or self._turns.ahead(key, 1) <= self._max_begun

    def _give_turns(self) -> None:
        now = time.monotonic()
        while (key := self._waiting.next_tenant(now)) is not None and self._may_begin(key):
            # Under an overload that lasts, the oldest would begin when their time is nearly over, and so would all that
            # follow. So the newest go first (adaptive LIFO).
            age_s = now - self._waiting.oldest(key).arrival_time
            is_late = self.max_queue_time_s > 0 and age_s > LATE_SHARE * self.max_queue_time_s
            _, place = self._waiting.pop(now, newest=is_late)
            if place.waiter is not None and place.waiter.done():
                continue  # its wait has just ended with an error
            place.has_begun = True
            self._count_rows(key, place.num_rows)
            self._turns.charge(key, place.num_rows, now)
            if place.waiter is not None:
                place.waiter.set_result(None)
