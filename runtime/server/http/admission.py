"""Refuses requests before they reach a route: API keys, hosts and origins, capacity, and limits on the body.

`AdmissionMiddleware` decides on the path, the headers and a few counters, before a byte of the body is read.
`BodyLimitMiddleware` stands around it and also turns every error raised outside of the routes into a response.
Both are plain ASGI, so that nothing stands between a route and its client's disconnect.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.constrained.tenant_shares import TenantShares
from plait.runtime.server.errors import OVERLOADED, TIMEOUT, ApiError, as_api_error
from plait.runtime.server.http.api_keys import find_key_name
from plait.runtime.server.http.call_queue import PARTICLES, CallQueue, Refusal, needs_place
from plait.runtime.server.http.error_bodies import error_body
from plait.runtime.server.http.hosts_and_origins import BrowserChecks
from plait.runtime.server.http.static_page import PAGE_FILES
from plait.runtime.server.in_flight import DRAINED, InFlightRequests, RequestRecord, RequestSize, current_request
from plait.runtime.server.settings import ServerSettings

PUBLIC_PATHS = frozenset({"/", "/health", "/ready"})  # need no API key
ADMITTED_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})  # count against the capacity
UPLOAD_PATH = "/v1/files"  # its bodies are files, which have limits of their own and hold no prompt
SMALL_BODY_BYTES = 1 << 16  # of a request that runs no call: it is taken however many bytes wait
FORM_BYTES = 1 << 16  # of an upload beside its file
CLOSE = {"Connection": "close"}  # in the response to a body whose rest is not read
RATE_LIMIT_ERROR = "rate_limit_error"
MAX_UPLOADS = 64  # that are received at once, shared by key
MAX_WITHOUT_PLACE = 1024  # requests that run no call, at once, shared by key


class AdmissionControl:
    """Decides which requests of one server are admitted. Shared by all of its requests.

    queues: one for each model. With several, a request is refused from its headers only if every queue would refuse it,
    and else by the queue of its model, which its body names. A request has a place in a queue once its body has
    arrived: what does not arrive keeps nobody out. The bytes of a body count as they arrive, until its turn.
    """

    def __init__(self, settings: ServerSettings, in_flight: InFlightRequests, queues: Sequence[CallQueue] = ()) -> None:
        self.settings, self.in_flight = settings, in_flight
        self.queues = list(queues) or [CallQueue(settings)]
        self.body_bytes = TenantShares(settings.key_weights)  # of requests that wait; the units are bytes
        self.uploads, self.without_place = TenantShares(settings.key_weights), TenantShares(settings.key_weights)
        self.browser_checks = BrowserChecks(settings)
        self.is_draining = False
        self.public_paths = PUBLIC_PATHS | (PAGE_FILES.keys() if settings.page else frozenset())
        if settings.open_metrics:
            self.public_paths |= {"/metrics"}

    @property
    def queue(self) -> CallQueue:
        """The queue of the first model."""
        return self.queues[0]

    @property
    def is_full(self) -> bool:
        """Whether the capacity of every model is full. With API keys it never is: a key without a call gets a place."""
        return not self.settings.api_keys and all(queue.refusal("") for queue in self.queues)

    def authenticate(self, path: str, headers: dict[bytes, bytes]) -> str:
        """Returns the name of the API key in `headers`; "" if none is needed.

        `path` is the path of the ASGI scope, which no header can change. Raises ApiError 401.
        """
        keys = self.settings.api_keys
        if not keys:
            return ""
        key_name = find_key_name(_api_key(headers), keys)
        if key_name is not None:
            return key_name
        if path in self.public_paths:
            return ""
        is_missing = not _api_key(headers)
        text = (
            "an API key is needed: send it as 'Authorization: Bearer KEY'" if is_missing else "the API key is not valid"
        )
        raise ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def check_capacity(self, tenant: str, num_bytes: int, needs_place: bool = True) -> None:
        """Raises ApiError 503 while draining or full, and 429 if the key exceeds its share; each with Retry-After.

        num_bytes: of the body, as the headers say. needs_place: whether it may run calls, see `needs_place`.
        """
        if self.is_draining:
            raise self.draining()
        if not needs_place:
            if num_bytes > SMALL_BODY_BYTES:
                self._check_bytes(tenant, num_bytes)
            return
        refusals = [queue.refusal(tenant) for queue in self.queues]
        if all(refusals):
            assert refusals[0] is not None
            raise self._queue_full(refusals[0])
        self._check_bytes(tenant, num_bytes)
        limit, num_running = self.settings.max_requests_per_key, self.in_flight.num_of_tenant(tenant)
        if limit and num_running >= limit:
            raise self._key_limit_reached(f"this key has {num_running} requests running; its limit is {limit}")

    def _check_bytes(self, tenant: str, num_bytes: int, num_own: int = 0) -> None:
        """Raises ApiError 503 or 429 if a further `num_bytes` of a body exceed the limit, beside others of the key.

        num_own: bytes of the body that are counted already.
        """
        held, limit = self.body_bytes, self.settings.max_queue_bytes
        if held.ahead(tenant, num_bytes) <= limit or held.held(tenant) == num_own:
            return
        is_own_share = any(name != tenant for name in held.holders())
        text = f"the bodies of waiting requests would exceed this key's share of {limit} bytes"
        raise self._queue_full(Refusal(text, is_own_share))

    def admit(self, record: RequestRecord) -> None:
        """Counts a request that `check_capacity` has let pass."""
        self.in_flight.admit(record)
        if not needs_place(record.path):
            self.in_flight.set_num_key_requests(record, 0)
        record.reserve_calls = partial(self.reserve_calls, record)
        record.reserve_program = partial(self.reserve_program, record)

    def count_without_place(self, record: RequestRecord) -> None:
        """Counts an upload, or another request that runs no call, until it ends. Raises ApiError 503 or 429."""
        shares, limit, what = self.without_place, MAX_WITHOUT_PLACE, "requests that run no call are being answered"
        if record.path == UPLOAD_PATH:
            shares, limit, what = self.uploads, MAX_UPLOADS, "uploads are being received"
        if shares.ahead(record.tenant, 1) > limit:
            is_own_share = any(name != record.tenant for name in shares.holders())
            raise self._queue_full(Refusal(f"{limit} {what}", is_own_share))
        shares.take(record.tenant)
        record.on_end.append(lambda: shares.take(record.tenant, -1))

    def observe_body(self, record: RequestRecord, receive: Receive) -> Receive:
        """Returns a `receive` that counts the bytes of the body and, once it has arrived, gives the request a place.

        It raises ApiError 503 or 429 if the key exceeds its share.
        """

        async def observed_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                num_bytes = len(message.get("body", b""))
                if num_bytes:
                    if needs_place(record.path) or record.num_body_bytes + num_bytes > SMALL_BODY_BYTES:
                        self._check_bytes(record.tenant, num_bytes, record.num_body_bytes)
                    self.body_bytes.take(record.tenant, num_bytes)
                    record.num_body_bytes += num_bytes
                if not message.get("more_body") and len(self.queues) == 1:
                    self.enter_queue(record, self.queue)
            return message

        return observed_receive

    def enter_queue(self, record: RequestRecord, queue: CallQueue) -> None:
        """Gives an admitted request a place in the queue of its model. Raises ApiError 503 or 429."""
        if record.place is not None or not record.is_admitted or record.is_background or not needs_place(record.path):
            return
        if (refusal := queue.refusal(record.tenant)) is not None:
            raise self._queue_full(refusal)
        record.place = queue.admit(record.tenant)

    def draining(self) -> ApiError:
        """The error of a request that the end of the server ends."""
        return self._unavailable("the server is shutting down", DRAINED)

    def has_turn(self, record: RequestRecord) -> bool:
        """Whether the request's calls may start now. If so, its body no longer counts as one that waits."""
        if record.place is not None and not record.place.queue.begin(record.place):
            return False
        self._release_bytes(record)
        return True

    async def wait_for_turn(self, record: RequestRecord, at_most_s: float = math.inf) -> None:
        """Returns when the request's calls may start, or after `at_most_s`. Raises QueueTimeout, and ApiError 503."""
        if not self.has_turn(record):
            assert record.place is not None
            start = time.monotonic()
            await record.place.wait_for_turn(record.start_deadline, at_most_s)
            record.wait_s += time.monotonic() - start
            self.has_turn(record)

    def leave_queue(self, record: RequestRecord) -> None:
        """Takes back what a request held that was answered or has failed."""
        self._release_bytes(record)
        if record.place is not None:
            record.place.queue.end(record.place)

    def _release_bytes(self, record: RequestRecord) -> None:
        if record.num_body_bytes:
            self.body_bytes.take(record.tenant, -record.num_body_bytes)
            record.num_body_bytes = 0

    def reserve_calls(self, record: RequestRecord, size: RequestSize) -> None:
        """Counts an admitted request as the rows that its calls can occupy.

        Raises ApiError 503 or 429 if they exceed a limit beside other requests, and 400 if particles do so alone.
        Calls without particles that are alone may have any number of rows.
        """
        if size.num_key_requests > 1:
            assert record.place is not None
            record.place.queue.check_alone(size.num_rows, "particles", PARTICLES)
            self._check_key(record, size.num_key_requests, "this request needs")
        self._reserve(record, size.num_rows, size.num_rows)
        self.in_flight.set_num_key_requests(record, size.num_key_requests)

    def reserve_program(self, record: RequestRecord, num_calls: int) -> None:
        """Counts an admitted program as `num_calls` calls, and as that many requests of its key.

        Raises ApiError 400 if the program alone exceeds a limit, 429 or 503 if it does so beside other requests.
        """
        assert record.place is not None
        record.place.queue.check_alone(num_calls, "program", "the program can have")
        self._check_key(record, num_calls, "this program needs")
        self._reserve(record, num_calls, 1)
        self.in_flight.set_num_key_requests(record, num_calls)

    def _check_key(self, record: RequestRecord, num_requests: int, need: str) -> None:
        """Raises ApiError 429 if the request exceeds the limit of its key beside other requests."""
        limit = self.settings.max_requests_per_key
        others = self.in_flight.num_of_tenant(record.tenant) - record.num_key_requests
        if limit and others + num_requests > limit:
            text = f"this key has {others} requests running, and {need} {num_requests}; its limit is {limit}"
            raise self._key_limit_reached(text)

    def _reserve(self, record: RequestRecord, num_calls: int, num_rows: int) -> None:
        """Counts the request as `num_calls` calls. Raises ApiError 503 or 429."""
        place = record.place
        assert place is not None
        queue, num_own = place.queue, place.num_calls
        refusal = queue.refusal(record.tenant, num_calls, num_own) if num_calls > num_own else None
        if refusal is not None and queue.num_calls > num_own:
            raise self._queue_full(refusal)
        queue.set_size(place, max(num_calls, num_own), num_rows)

    def _key_limit_reached(self, text: str) -> ApiError:
        text = f"{text}; try again later"
        return ApiError(429, text, type=RATE_LIMIT_ERROR, code="rate_limit_exceeded", headers=self._retry_after())

    def _queue_full(self, refusal: Refusal) -> ApiError:
        """429 if the requests of this key fill its share while other keys have some, else 503."""
        if refusal.is_own_share:
            return self._key_limit_reached(refusal.text)
        return self._unavailable(refusal.text, "queue_full")

    def _unavailable(self, text: str, code: str) -> ApiError:
        text = f"{text}; try again later"
        return ApiError(503, text, type=OVERLOADED, code=code, headers=self._retry_after())

    def _retry_after(self) -> dict[str, str]:
        return {"Retry-After": str(self.settings.retry_after_s)}


class AdmissionMiddleware:
    """Applies an `AdmissionControl`, and sets `scope["state"]["tenant"]`. Raises ApiError for a refused request."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self.app, self.admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        tenant, record = self.admission.authenticate(scope["path"], headers), current_request()
        assert record is not None
        scope["state"]["tenant"] = record.tenant = tenant
        self.admission.browser_checks.check(scope, has_key=tenant != "")
        if scope["method"] in ADMITTED_METHODS:
            num_bytes = 0 if scope["path"] == UPLOAD_PATH else content_length(scope)
            self.admission.check_capacity(tenant, num_bytes, needs_place(scope["path"]))
            await self._run_admitted(record, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _run_admitted(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        self.admission.admit(record)
        if not needs_place(record.path):
            self.admission.count_without_place(record)
        if scope["path"] != UPLOAD_PATH:
            receive = self.admission.observe_body(record, receive)
        try:
            await self.app(scope, receive, send)
        finally:
            self.admission.leave_queue(record)


class BodyLimitMiddleware:
    """Limits a body to `max_body_bytes`, and its arrival to `body_timeout_s` seconds from the request's start.

    An upload may have `max_file_bytes` and its form, and `body_timeout_s` for each `max_body_bytes` of it.

    Answers an exception that reaches it, as long as the response has not started.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings
        self.max_upload_bytes = settings.max_file_bytes + FORM_BYTES if settings.files_dir else 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracking_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            max_bytes, timeout_s = self._limits(scope)
            if content_length(scope) > max_bytes:
                raise self._too_large(max_bytes)
            await self.app(scope, self._limited(receive, max_bytes, timeout_s), tracking_send)
        except asyncio.CancelledError:
            record = current_request()
            if started or record is None or record.code != DRAINED:
                raise
            headers = {"Retry-After": str(self.settings.retry_after_s)}
            error = ApiError(503, "the server is shutting down", type=OVERLOADED, code=DRAINED, headers=headers)
            await _send_error(error, tracking_send)
        except Exception as error:
            api_error = as_api_error(error, retry_after_s=self.settings.retry_after_s)
            if started:
                raise  # too late for an error response: the connection is closed
            await _send_error(api_error, tracking_send)

    def _limits(self, scope: Scope) -> tuple[int, float]:
        """The most bytes of the body of a request, and the seconds in which it must arrive."""
        max_bytes, timeout_s = self.settings.max_body_bytes, self.settings.body_timeout_s
        if scope["path"] != UPLOAD_PATH or not self.max_upload_bytes:
            return max_bytes, timeout_s
        num_bytes = content_length(scope) or self.max_upload_bytes
        return self.max_upload_bytes, timeout_s * max(1.0, num_bytes / max_bytes)

    def _limited(self, receive: Receive, max_bytes: int, timeout_s: float) -> Receive:
        bytes_left, is_complete = max_bytes, False
        deadline = asyncio.get_running_loop().time() + timeout_s

        async def limited_receive() -> Message:
            nonlocal bytes_left, is_complete
            if is_complete:  # the next message is the disconnect, which may come as late as the response ends
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {timeout_s:g} s"
                raise ApiError(408, text, type=TIMEOUT, code="body_timeout", headers=CLOSE) from None
            is_complete = not message.get("more_body")
            bytes_left -= len(message.get("body", b""))
            if bytes_left < 0:
                raise self._too_large(max_bytes)
            return message

        return limited_receive

    def _too_large(self, max_bytes: int) -> ApiError:
        text = f"the body is larger than {max_bytes} bytes"
        return ApiError(413, text, code="body_too_large", headers=CLOSE)


async def _send_error(error: ApiError, send: Send) -> None:
    """Sends an error response that closes the connection, where a body may still follow."""
    record = current_request()
    assert record is not None
    record.code = record.code or error.code
    body = msgspec.json.encode(error_body(record.path, error, record.request_id))
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | CLOSE | error.headers
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def content_length(scope: Scope) -> int:
    """The Content-Length of a request; 0 if there is none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def _api_key(headers: dict[bytes, bytes]) -> bytes:
    """The key in `Authorization: Bearer` or `X-Api-Key`; b"" if there is none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
