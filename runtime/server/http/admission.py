"""Who may come in, and how many at once: decided on the path, the headers and a few counts, before a byte of the body
is read.

Everything needs a key, where there are keys, except for the paths that are listed as open. The path is ASGI's own: no
header can change it.

Knows: keys, counts, paths. Must not know: routes, bodies, what a request costs.
"""

from __future__ import annotations

from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.runtime.server.errors import OVERLOADED, ApiError
from plait.runtime.server.http.api_keys import find_key_name
from plait.runtime.server.http.static_page import PAGE_FILES
from plait.runtime.server.in_flight import InFlightRequests, RequestRecord, current_request
from plait.runtime.server.settings import ServerSettings

PUBLIC_PATHS = frozenset({"/health", "/ready"})
ADMITTED_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
PERMISSION_ERROR, RATE_LIMIT_ERROR = "permission_error", "rate_limit_error"


class AdmissionControl:
    """What is shared by all requests of a server: whether it still admits, and the room that is left."""

    def __init__(self, settings: ServerSettings, in_flight: InFlightRequests) -> None:
        self.settings, self.in_flight = settings, in_flight
        self.is_draining = False
        self.public_paths = PUBLIC_PATHS | (PAGE_FILES.keys() if settings.page else frozenset())
        if settings.open_metrics:
            self.public_paths |= {"/metrics"}

    @property
    def is_full(self) -> bool:
        """Whether as many calls run and wait as may."""
        return self.in_flight.num_calls >= self.capacity

    @property
    def capacity(self) -> int:
        """Calls that may run and wait."""
        return self.settings.max_running + self.settings.max_queue

    def authenticate(self, path: str, headers: dict[bytes, bytes]) -> str:
        """The name of the key that was given; "" where none is needed. Raises ApiError 401."""
        keys = self.settings.api_keys
        if not keys:
            return ""
        owner = find_key_name(_key(headers), keys)
        if owner is not None:
            return owner
        if path in self.public_paths:
            return ""
        text = "an API key is needed: send it as 'Authorization: Bearer KEY'"
        raise ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError 403 for what a page of another origin sends without having been asked to."""
        allowed = self.settings.cors_origins
        if headers.get(b"sec-fetch-site") in (None, b"same-origin", b"none") or "*" in allowed:
            return
        if headers.get(b"origin", b"").decode("latin-1") not in allowed:
            text = "a page of another origin may not call this server; its operator can allow it with --cors-origin"
            raise ApiError(403, text, type=PERMISSION_ERROR, code="cross_origin")

    def check_capacity(self, tenant: str) -> None:
        """Raises ApiError 503 or 429, with Retry-After, when there is none."""
        retry = {"Retry-After": str(self.settings.retry_after_s)}
        if self.is_draining:
            raise ApiError(503, "the server is being stopped", type=OVERLOADED, code="draining", headers=retry)
        if self.is_full:
            raise self._overloaded(f"{self.in_flight.num_calls} calls run or wait already; try again later")
        limit = self.settings.max_requests_per_key
        if limit and self.in_flight.num_of_tenant(tenant) >= limit:
            text = f"this key has {limit} requests running, as many as it may"
            raise ApiError(429, text, type=RATE_LIMIT_ERROR, code="rate_limit_exceeded", headers=retry)

    def reserve_calls(self, record: RequestRecord, calls: int) -> None:
        """Counts an admitted request as the `calls` it will have at once: its prompts times its answers.

        Raises ApiError 503 where there is no room for them; a request that is alone is let in whatever its size.
        """
        others = self.in_flight.num_calls - record.num_calls
        if others and others + calls > self.capacity:
            raise self._overloaded(
                f"{others} calls run or wait already, and this request asks for {calls}; try again later"
            )
        if calls > record.num_calls:
            self.in_flight.set_num_calls(record, calls)

    def _overloaded(self, text: str) -> ApiError:
        retry = {"Retry-After": str(self.settings.retry_after_s)}
        return ApiError(503, text, type=OVERLOADED, code="queue_full", headers=retry)


class AdmissionMiddleware:
    """The middleware. Sets `scope["state"]["tenant"]`; what it refuses it raises as ApiError."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self.app, self.admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
            tenant = self.admission.authenticate(scope["path"], headers)
            scope["state"]["tenant"] = tenant
            record = current_request()
            if record is not None:
                record.tenant = tenant
            if scope["method"] in ADMITTED_METHODS:
                self.admission.check_origin(headers)
                self.admission.check_capacity(tenant)
                if record is not None:
                    self.admission.in_flight.admit(record)
                    record.reserve_calls = partial(self.admission.reserve_calls, record)
        await self.app(scope, receive, send)


def _key(headers: dict[bytes, bytes]) -> bytes:
    """The key in either of the headers that clients use; b"" for none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
