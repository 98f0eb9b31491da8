"""Predicts how long a new request would wait for its first token, and decides from that whether it is admitted.

`QueueControl` knows the admitted calls of all API keys and the rates at which the runtime works. It does no I/O and
reads no clock: every method gets the time, so it can be simulated.

The queue is shared by weighted fair queueing: while the runtime does the waiting work own(k) of key k, it does for
another key j at most own(k) * weight(j) / weight(k). So before a new request of key k begins, this work is done:

    sum over keys j of min(waiting(j), own(k) * weight(j) / weight(k))

A key within its share of the queue is therefore never refused because of others, whatever they have queued. n keys of
equal weight can have 1 + 1/2 + ... + 1/n times the limits in all, if they come one after the other.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

MIN_WAITING_CALLS = 4  # are admitted whatever the rate, and show what a full batch can do
IDLE_ROWS = 128  # a server is idle when at most one row in so many is occupied (of 64 none): rare under load
IDLE_S = 0.1  # it is idle when that lasts: a server under load has no calls for shorter times
BURST_S = 0.5  # after it was idle, in which calls that find a free row may wait longer
BURST_FACTOR = 10  # times max_queue_time_s, or times LONGEST_QUEUE_S by default
QUEUE_CALLS = 6  # by default a request may wait for about as long as so many calls take
SHORTEST_QUEUE_S, LONGEST_QUEUE_S = 0.1, 0.3  # bounds of that time
MIN_EVENTS = 4  # before a rate counts as measured
STEP_S = 0.01  # events within so much busy time of each other are of one step
TOKEN_WINDOW = 64  # begun calls that the token rate is measured over
OLD_EVENT_S = 5.0  # older events are dropped, except for the last KEPT_EVENTS
KEPT_EVENTS = 16
DEFAULT_CALLS_PER_S = 8.0  # ended calls per second, until it is measured


@dataclass(eq=False)
class QueuedRequest:
    """An admitted request.

    calls: that it can have in flight at once. started: those that it starts at once when its body has arrived; until
    then 0, so that a slow client delays nobody. call_tokens: prompt tokens per started call. begun: how many of the
    started calls have their first token.
    """

    key: str
    call_tokens: int = 0
    calls: int = 1
    started: int = 0
    begun: int = 0

    @property
    def waiting_calls(self) -> int:
        """Calls without a first token."""
        return self.started - self.begun


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused. retry_after_s: seconds until it would be admitted if no other request came."""

    text: str
    retry_after_s: float
    is_own_share: bool = False  # the key's own requests fill its share, while other keys wait


@dataclass(slots=True)
class StepEvents:
    """The events of one step of the runtime: their number and amount, and the time and busy time of the first one."""

    count: int
    amount: float
    busy_s: float
    time: float


class BusyRate:
    """The amount per second of about the last `window` events, over the time in which there was enough work.

    One step of the runtime causes several events at once, and the time before them is the time of all. So only complete
    steps count, and the first one only gives the start of the time.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._steps: deque[StepEvents] = deque()
        self._num_events = 0
        self._busy_s = self._updated = 0.0
        self._is_busy = False

    def set_busy(self, is_busy: bool, now: float) -> None:
        """Sets whether there is enough work from now on."""
        self._update(now)
        self._is_busy = is_busy
        if is_busy and not self._steps:
            self._steps.append(StepEvents(0, 0.0, self._busy_s, now))

    def add(self, amount: float, now: float) -> None:
        """Counts an event, if there is enough work."""
        self._update(now)
        if not self._is_busy:
            return
        last = self._steps[-1]
        if last.count and self._busy_s - last.busy_s <= STEP_S:
            last.count, last.amount = last.count + 1, last.amount + amount
        else:
            self._steps.append(StepEvents(1, amount, self._busy_s, now))
        self._num_events += 1
        while len(self._steps) > 2 and self._num_after(1) >= self.window:
            self._drop_first()

    def per_second(self, now: float) -> float | None:
        """The rate. None until it is measured."""
        self._update(now)
        if self._num_events < MIN_EVENTS or len(self._steps) < 2:
            return None
        seconds = self._busy_s - self._steps[0].busy_s
        amount = sum(step.amount for step in self._steps) - self._steps[0].amount
        return amount / seconds if seconds > 0 and amount > 0 else None

    def _update(self, now: float) -> None:
        if self._is_busy:
            self._busy_s += max(0.0, now - self._updated)
        self._updated = max(self._updated, now)
        while len(self._steps) > 2 and self._steps[0].time < now - OLD_EVENT_S and self._num_after(0) >= KEPT_EVENTS:
            self._drop_first()

    def _num_after(self, position: int) -> int:
        """The number of events after the first step (0), or after the second one (1)."""
        return self._num_events - sum(self._steps[index].count for index in range(position + 1))

    def _drop_first(self) -> None:
        self._num_events -= self._steps.popleft().count


class QueueControl:
    """The admitted calls of one server, by key.

    max_running: calls that the runtime runs at once. max_queue: further calls that may wait. max_queue_time_s: the
    longest predicted time until the prompt of an admitted request is computed (0: no limit; None: the time that
    QUEUE_CALLS calls take, within bounds); in the first BURST_S after the server was idle, calls that find a free row
    may wait BURST_FACTOR times as long. weights: of keys, 1 by default.
    """

    def __init__(
        self,
        max_running: int,
        max_queue: int,
        max_queue_time_s: float | None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.max_running, self.max_queue = max_running, max_queue
        self.max_queue_time_s, self.weights = max_queue_time_s, weights or {}
        self.calls: Counter[str] = Counter()  # waiting and running, by key
        self.waiting_calls: Counter[str] = Counter()
        self.waiting_tokens: Counter[str] = Counter()
        self.num_calls = self.num_waiting = 0
        self._idle_since, self._last_idle = -math.inf, -math.inf
        self._token_rate = BusyRate(TOKEN_WINDOW)
        self._end_rate = BusyRate(max_running)

    @property
    def capacity(self) -> int:
        """The number of calls that may run or wait at once."""
        return self.max_running + self.max_queue

    def set_max_running(self, max_running: int) -> None:
        """Sets how many calls the runtime runs at once, which is known when it has started."""
        self.max_running = self._end_rate.window = max_running

    # -- events -----------------------------------------------------------------------------------

    def admit(self, key: str, now: float) -> QueuedRequest:
        """Adds a request, as one call, before its body has arrived."""
        request = QueuedRequest(key)
        self._count(request, 1, now)
        return request

    def set_size(self, request: QueuedRequest, calls: int, started: int, tokens: int, now: float) -> None:
        """Sets the size of a request once its body has arrived. tokens: of the prompts of all `started` calls."""
        self._count(request, -1, now)
        request.calls, request.started = calls, max(started, request.begun)
        request.call_tokens = tokens // max(1, request.started)
        self._count(request, 1, now)

    def begin(self, request: QueuedRequest, begun: int, now: float) -> None:
        """Sets how many of the request's calls have their first token."""
        num_new = min(begun, request.started) - request.begun
        if num_new > 0:
            self._token_rate.add(num_new * request.call_tokens, now)
            self._count(request, -1, now)
            request.begun += num_new
            self._count(request, 1, now)

    def end(self, request: QueuedRequest, now: float) -> None:
        """Removes a request that was answered or has failed."""
        if request.begun:
            self._end_rate.add(request.calls, now)
        self._count(request, -1, now)

    def _count(self, request: QueuedRequest, sign: int, now: float) -> None:
        """Adds the request to all counts, or removes it."""
        waiting = request.waiting_calls
        if now - self._idle_since >= IDLE_S:
            self._last_idle = now
        self.num_calls += sign * request.calls
        if self.num_calls > self.max_running // IDLE_ROWS:
            self._idle_since = math.inf
        elif self._idle_since == math.inf:
            self._idle_since = now
        self.num_waiting += sign * waiting
        for counts, amount in (
            (self.calls, request.calls),
            (self.waiting_calls, waiting),
            (self.waiting_tokens, waiting * request.call_tokens),
        ):
            counts[request.key] += sign * amount
            if not counts[request.key]:
                del counts[request.key]
        if self.num_waiting >= MIN_WAITING_CALLS:
            self._token_rate.set_busy(True, now)
        if self.num_calls >= self.max_running:
            self._end_rate.set_busy(True, now)
        if not self.num_waiting:  # not before: all calls that one step begins must count
            self._token_rate.set_busy(False, now)
            self._end_rate.set_busy(self.num_calls >= self.max_running, now)

    # -- decisions --------------------------------------------------------------------------------

    def may_refuse(self) -> bool:
        """Whether `refusal` may refuse a request now. It refuses none if this is False."""
        return self.num_waiting >= MIN_WAITING_CALLS or self.num_calls >= self.capacity

    def refusal(self, key: str, now: float) -> Refusal | None:
        """Why a new request is refused, counted as one call; None if it is admitted."""
        full = self.calls_refusal(key, 1, now)
        before = self._before(self.waiting_calls, key, 1)
        if full is not None or self.max_queue_time_s == 0 or before <= MIN_WAITING_CALLS:
            return full
        limit_s, queue_s = self._limit_s(before, now), self.predict(key, now)
        if queue_s <= limit_s:
            return None
        text = f"the request would wait for about {queue_s:.2g} s, and the limit is {limit_s:.2g} s"
        return self._refusal(key, text, queue_s - limit_s)

    def _limit_s(self, calls: float, now: float) -> float:
        """How long the last of `calls` waiting calls may wait. A server that was idle takes as many as it has rows."""
        is_burst = now - self._last_idle <= BURST_S and calls <= self._free_rows
        if self.max_queue_time_s is not None:
            return self.max_queue_time_s * (BURST_FACTOR if is_burst else 1)
        if is_burst:
            return LONGEST_QUEUE_S * BURST_FACTOR
        return min(LONGEST_QUEUE_S, max(SHORTEST_QUEUE_S, QUEUE_CALLS / self.calls_per_s(now)))

    def calls_refusal(self, key: str, calls: int, now: float, replacing: int = 0) -> Refusal | None:
        """Why `calls` further calls exceed the key's share of the capacity; None if they do not.

        replacing: calls of the same request that are counted already.
        """
        others = self.num_calls - replacing
        before = self._before(self.calls, key, calls - replacing)
        if before <= self.capacity:
            return None
        need = f", and this request needs {calls}" if calls > 1 else ""
        text = f"{others} calls are running or waiting{need}"
        return self._refusal(key, text, (before - self.capacity) / self.calls_per_s(now))

    def predict(self, key: str, now: float) -> float:
        """Seconds until the prompt of a new request of `key` would be computed: the longer of two times.

        One is that to compute the prompt tokens before it, the other that until a row is free for it.
        """
        tokens = self._before(self.waiting_tokens, key, 0)
        return self._seconds(tokens, self._before(self.waiting_calls, key, 1), now)

    def queue_time_s(self, now: float) -> float:
        """Seconds until all that waits now has its first token."""
        return self._seconds(sum(self.waiting_tokens.values()), self.num_waiting, now)

    def is_full(self, now: float) -> bool:
        """Whether a request of a key that has its share would be refused."""
        if self.num_calls >= self.capacity:
            return True
        is_limited = self.max_queue_time_s != 0 and self.num_waiting >= MIN_WAITING_CALLS
        return is_limited and self.queue_time_s(now) >= self._limit_s(self.num_waiting + 1, now)

    def tokens_per_s(self, now: float) -> float | None:
        """Prompt tokens of begun calls per second, while calls waited. None until it is measured."""
        return self._token_rate.per_second(now)

    def calls_per_s(self, now: float) -> float:
        """Ended calls per second, while all rows were occupied."""
        return self._end_rate.per_second(now) or DEFAULT_CALLS_PER_S

    def _seconds(self, tokens: float, calls: float, now: float) -> float:
        rate = self.tokens_per_s(now)
        token_s = tokens / rate if rate is not None else 0.0
        return max(token_s, max(0.0, calls - self._free_rows) / self.calls_per_s(now))

    @property
    def _free_rows(self) -> int:
        return max(0, self.max_running - (self.num_calls - self.num_waiting))

    def _before(self, amounts: Mapping[str, int], key: str, amount: float) -> float:
        """The part of `amounts` that is served until the key's own amount, with `amount` added, is served."""
        own = amounts.get(key, 0) + amount
        per_weight = own / self._weight(key)
        return own + sum(min(other, per_weight * self._weight(name)) for name, other in amounts.items() if name != key)

    def _weight(self, key: str) -> float:
        return self.weights.get(key, 1.0)

    def _refusal(self, key: str, text: str, retry_after_s: float) -> Refusal:
        is_own_share = any(name != key for name in self.waiting_calls)
        if is_own_share:
            text += "; other keys wait, and the requests of this key fill its share"
        return Refusal(text, retry_after_s, is_own_share)
