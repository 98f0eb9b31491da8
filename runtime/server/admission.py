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
from plait.runtime.server.in_flight import InFlight, Record, current
from plait.runtime.server.keys import owner_of
from plait.runtime.server.page_files import FILES
from plait.runtime.server.settings import ServerSettings

OPEN = frozenset({"/health", "/ready"})
WORK_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
PERMISSION, RATE = "permission_error", "rate_limit_error"


class Gate:
    """What is shared by all requests of a server: whether it still admits, and the room that is left."""

    def __init__(self, settings: ServerSettings, in_flight: InFlight) -> None:
        self.settings, self.in_flight = settings, in_flight
        self.is_draining = False
        self.open_paths = OPEN | (FILES.keys() if settings.page else frozenset())
        if settings.open_metrics:
            self.open_paths |= {"/metrics"}

    @property
    def is_full(self) -> bool:
        """Whether as many calls run and wait as may."""
        return self.in_flight.num_calls >= self.room

    @property
    def room(self) -> int:
        """Calls that may run and wait."""
        return self.settings.max_running + self.settings.max_queue

    def owner(self, path: str, headers: dict[bytes, bytes]) -> str:
        """The name of the key that was given; "" where none is needed. Raises ApiError 401."""
        keys = self.settings.api_keys
        if not keys:
            return ""
        owner = owner_of(_key(headers), keys)
        if owner is not None:
            return owner
        if path in self.open_paths:
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
            raise ApiError(403, text, type=PERMISSION, code="cross_origin")

    def check_room(self, tenant: str) -> None:
        """Raises ApiError 503 or 429, with Retry-After, when there is none."""
        retry = {"Retry-After": str(self.settings.retry_after_s)}
        if self.is_draining:
            raise ApiError(503, "the server is being stopped", type=OVERLOADED, code="draining", headers=retry)
        if self.is_full:
            raise self._full(f"{self.in_flight.num_calls} calls run or wait already; try again later")
        limit = self.settings.max_requests_per_key
        if limit and self.in_flight.num_of(tenant) >= limit:
            text = f"this key has {limit} requests running, as many as it may"
            raise ApiError(429, text, type=RATE, code="rate_limit_exceeded", headers=retry)

    def claim(self, record: Record, calls: int) -> None:
        """Counts an admitted request as the `calls` it will have at once: its prompts times its answers.

        Raises ApiError 503 where there is no room for them; a request that is alone is let in whatever its size.
        """
        others = self.in_flight.num_calls - record.num_calls
        if others and others + calls > self.room:
            raise self._full(f"{others} calls run or wait already, and this request asks for {calls}; try again later")
        if calls > record.num_calls:
            self.in_flight.widen(record, calls)

    def _full(self, text: str) -> ApiError:
        retry = {"Retry-After": str(self.settings.retry_after_s)}
        return ApiError(503, text, type=OVERLOADED, code="queue_full", headers=retry)


class Admission:
    """The middleware. Sets `scope["state"]["tenant"]`; what it refuses it raises as ApiError."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
            tenant = self.gate.owner(scope["path"], headers)
            scope["state"]["tenant"] = tenant
            record = current()
            if record is not None:
                record.tenant = tenant
            if scope["method"] in WORK_METHODS:
                self.gate.check_origin(headers)
                self.gate.check_room(tenant)
                if record is not None:
                    self.gate.in_flight.begin_work(record)
                    record.claim = partial(self.gate.claim, record)
        await self.app(scope, receive, send)


def _key(headers: dict[bytes, bytes]) -> bytes:
    """The key in either of the headers that clients use; b"" for none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
