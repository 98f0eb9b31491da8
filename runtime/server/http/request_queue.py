"""Keeps a server's `QueueControl` up to date: with admitted requests, their bodies, first tokens and ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

from starlette.types import Message, Receive

from plait.runtime.server.http.queue_control import QueueControl, QueuedRequest, Refusal
from plait.runtime.server.in_flight import RequestRecord
from plait.runtime.server.settings import ServerSettings

BYTES_PER_TOKEN = 4  # of a body, until its prompt is tokenized
POLL_INTERVAL_S = 0.02  # of looking for first tokens, at most


class RequestQueue:
    """The admitted requests of one server. First tokens are looked for when the queue's state is needed."""

    def __init__(self, settings: ServerSettings) -> None:
        self.control = QueueControl(
            settings.max_running, settings.max_queue, settings.max_queue_time_s, settings.key_weights
        )
        self._requests: dict[RequestRecord, QueuedRequest] = {}
        self._waiting: dict[RequestRecord, QueuedRequest] = {}  # those that may have a call without a first token
        self._polled = 0.0

    def refusal(self, tenant: str) -> Refusal | None:
        """Why a new request of this key is refused; None if it is admitted."""
        return self.control.refusal(tenant, self._poll())

    def calls_refusal(self, record: RequestRecord, num_calls: int) -> Refusal | None:
        """Why the request may not have `num_calls` calls; None if it may. One that is alone may have any number."""
        if self.control.num_calls <= record.num_calls:
            return None
        return self.control.calls_refusal(record.tenant, num_calls, self._poll(), record.num_calls)

    def is_full(self) -> bool:
        """Whether a request of a key that has its share would be refused now."""
        return self.control.is_full(self._poll())

    def queue_time_s(self) -> float:
        """Seconds until all that waits now has its first token, as predicted."""
        return self.control.queue_time_s(self._poll())

    def admit(self, record: RequestRecord) -> None:
        """Adds a request, as one call."""
        self._requests[record] = self.control.admit(record.tenant, time.monotonic())

    def set_size(self, record: RequestRecord, num_started: int, num_tokens: int | None = None) -> None:
        """Sets how many calls the request starts at once, and the tokens of their prompts (None: as estimated)."""
        request = self._requests.get(record)
        if request is not None:
            tokens = request.started * request.call_tokens if num_tokens is None else num_tokens
            self.control.set_size(request, record.num_calls, num_started, tokens, time.monotonic())
            self._waiting[record] = request

    def end(self, record: RequestRecord) -> None:
        """Removes a request that was answered or has failed."""
        request = self._requests.pop(record, None)
        if request is None:
            return
        self._waiting.pop(record, None)
        now = time.monotonic()
        for begun, at in enumerate(sorted(_begin_times(record, now)), 1):
            self.control.begin(request, begun, at)
        self.control.end(request, now)

    def estimate_size(self, record: RequestRecord) -> None:
        """Estimates the request's tokens from its body, which has arrived."""
        if record.num_body_bytes:
            self.set_size(record, 1, record.num_body_bytes // BYTES_PER_TOKEN)

    def _poll(self) -> float:
        """Reports new first tokens to the control, in the order of their times. Returns the time."""
        now = time.monotonic()
        if now - self._polled < POLL_INTERVAL_S:
            return now
        self._polled = now
        begun = [
            (at, number, record)
            for record in self._waiting
            for number, at in enumerate(sorted(_begin_times(record, now)), 1)
        ]
        for at, number, record in sorted(begun, key=lambda item: item[:2]):
            request = self._requests[record]
            self.control.begin(request, number, at)
            if not request.waiting_calls:
                self._waiting.pop(record, None)
        return now


def observe_body(record: RequestRecord, receive: Receive) -> Receive:
    """Returns a `receive` that counts the bytes of the body. Once it has arrived, the tokens are estimated in the
    request's queue, if it is in one."""

    async def observed_receive() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            record.num_body_bytes += len(message.get("body", b""))
            if record.queue is not None and not message.get("more_body"):
                record.queue.estimate_size(record)
        return message

    return observed_receive


def _begin_times(record: RequestRecord, now: float) -> Iterator[float]:
    """The times of the first tokens of the request's calls; `now` for a call that has ended without tokens."""
    for call in record.calls:
        at = call.first_token_time
        if at is not None or call.usage is not None:
            yield at if at is not None else now
