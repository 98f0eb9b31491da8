"""Refuses requests for lack of capacity as soon as their headers have arrived, without a task or any middleware.

Under overload most requests are refused, so what one refusal costs is taken from the requests that are served. The
response, the log line and the metrics are those of the middleware. A request that anything else speaks against is left
to the middleware, which checks in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import Scope

from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.admission import (
    ADMITTED_METHODS,
    AdmissionControl,
    closing_response,
    content_length,
)
from plait.runtime.server.ops.request_context import RequestContextMiddleware


class EarlyResponse(NamedTuple):
    """A complete response, after which the connection is closed."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


Refuse = Callable[[Scope], EarlyResponse | None]


class EarlyRefusals:
    """The refusals of one application. `context` is its outermost middleware."""

    def __init__(self, admission: AdmissionControl, context: RequestContextMiddleware) -> None:
        self._admission, self._context = admission, context
        self._settings = admission.settings

    def response(self, scope: Scope) -> EarlyResponse | None:
        """Returns the refusal of a request; None if the application handles it."""
        if scope["method"] not in ADMITTED_METHODS or not self._admission.may_refuse():
            return None
        if self._context.tracing.is_active or content_length(scope) > self._settings.max_body_bytes:
            return None
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        if self._settings.cors_origins and b"origin" in headers:
            return None  # CORSMiddleware adds headers, without which a page cannot read the response
        try:
            tenant = self._admission.authenticate(scope["path"], headers)
            self._admission.browser_checks.check(scope, has_key=tenant != "")
        except ApiError:
            return None
        try:
            self._admission.check_capacity(tenant)
        except ApiError as error:
            return self._refuse(scope, tenant, error)
        return None

    def _refuse(self, scope: Scope, tenant: str, error: ApiError) -> EarlyResponse:
        record = self._context.new_record(scope)
        record.tenant, record.status = tenant, error.status
        headers, body = closing_response(error, record)
        headers.append((b"x-request-id", record.request_id.encode()))
        record.first_byte_time = record.end_time = time.monotonic()
        self._context.end(scope, record)
        return EarlyResponse(error.status, headers, body)
