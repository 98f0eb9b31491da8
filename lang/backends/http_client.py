"""`JsonHttp`: JSON requests over HTTP, with retries, server-sent events, and errors as CallFailed.

Redirects are not followed: urllib would send the headers, and so the API key, to whatever host they name.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Generator, Mapping
from functools import cache
from typing import Any

from plait.runtime.errors import CallFailed, CallRejected, DeadlineExceeded, InputError, Overloaded, RuntimeGone

RETRIES, FIRST_PAUSE_S, MAX_PAUSE_S = 3, 0.25, 8.0
BUSY = (429, 502, 503, 529)
MAX_ERROR_CHARS = 500
DEFAULT_TIMEOUT_S = 600.0


class JsonHttp:
    """Requests to one base URL. Statuses 429, 502, 503 and 529 are retried up to three times, unless the answer has the
    header `x-should-retry: false`."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise InputError(f"a URL must begin with http:// or https://, not {base_url!r:.80}")
        self.base_url = base_url.rstrip("/")
        self._headers = {"content-type": "application/json", **headers}

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """Returns the JSON at `path`. Raises CallFailed."""
        return self._json(self._open("GET", path, None, timeout_s))

    def post(self, path: str, body: Any, timeout_s: float | None = None) -> Any:
        """Posts `body` and returns the JSON answer, None if there is none. Raises CallFailed."""
        return self._json(self._open("POST", path, body, timeout_s))

    def events(
        self, path: str, body: Any, timeout_s: float | None, is_over: Callable[[], bool] = lambda: False
    ) -> Generator[Any, None, None]:
        """Posts `body` and yields the server-sent events as JSON. Closes the connection once `is_over()`.

        Raises CallFailed; `timeout_s` covers the whole stream.
        """
        deadline = time.monotonic() + (timeout_s or DEFAULT_TIMEOUT_S)
        with self._open("POST", path, body, timeout_s) as answer:
            try:
                for line in answer:
                    if is_over():
                        return
                    if time.monotonic() > deadline:
                        raise DeadlineExceeded(f"{self.base_url} did not finish within the timeout of the call")
                    data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data and data != b"[DONE]":
                        yield self._parsed(data)
            except TimeoutError as error:
                raise DeadlineExceeded(f"{self.base_url} sent nothing within the timeout of the call") from error
            except OSError as error:
                raise RuntimeGone(f"the connection to {self.base_url} was lost: {error}") from error

    def _open(self, method: str, path: str, body: Any, timeout_s: float | None) -> Any:
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        deadline = time.monotonic() + (timeout_s or DEFAULT_TIMEOUT_S)
        for attempt in range(RETRIES + 1):
            request = urllib.request.Request(self.base_url + path, data, self._headers, method=method)
            try:
                return _opener().open(request, timeout=max(0.01, deadline - time.monotonic()))
            except urllib.error.HTTPError as error:
                pause = _pause(error, attempt)
                may_retry = error.code in BUSY and error.headers.get("x-should-retry") != "false"
                if not may_retry or attempt == RETRIES or time.monotonic() + pause > deadline:
                    raise _failure(self.base_url, error) from None
                time.sleep(pause)
            except OSError as error:
                reason = getattr(error, "reason", error)
                if isinstance(reason, TimeoutError):
                    raise DeadlineExceeded(f"{self.base_url} did not answer within the timeout of the call") from None
                raise RuntimeGone(f"{self.base_url} cannot be reached: {reason}") from None
        raise AssertionError("every attempt returns or raises")

    def _json(self, answer: Any) -> Any:
        with answer:
            data = answer.read()
        return self._parsed(data) if data.strip().startswith((b"{", b"[")) else None

    def _parsed(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise CallFailed(f"{self.base_url} sent an answer that is not JSON: {data[:80]!r}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Lets a redirect raise HTTPError, as other statuses do."""

    def redirect_request(self, *_: Any) -> None:
        """Returns None: the redirect is not followed."""


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)


def _pause(error: urllib.error.HTTPError, attempt: int) -> float:
    """Returns the seconds to wait before the next attempt: the Retry-After header, or exponential backoff."""
    retry_after = error.headers.get("retry-after", "") if error.headers else ""
    is_number = retry_after.replace(".", "", 1).isdigit()
    return min(MAX_PAUSE_S, float(retry_after) if is_number else FIRST_PAUSE_S * 2**attempt)


def _failure(base_url: str, error: urllib.error.HTTPError) -> CallFailed:
    """Returns the error for an HTTP status, with the message of the server."""
    if 300 <= error.code < 400:
        return status_error(base_url, error.code, "a redirect, which is not followed")
    body = error.read(1 << 16).decode(errors="replace")
    try:
        message = parse_error(json.loads(body))[1]
    except ValueError:
        message = body
    return status_error(base_url, error.code, message)


def parse_error(body: Any) -> tuple[int, str]:
    """Returns (status, message) of an error body, with status 500 if it has none. Accepts {"error": {"message",
    "code"}}, {"error": "..."}, {"message"} and {"detail"}."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return 500, str(error)
    code = error.get("code")
    message = next((error[key] for key in ("message", "detail") if error.get(key)), error)
    return code if isinstance(code, int) and not isinstance(code, bool) else 500, str(message)


def status_error(name: str, status: int, message: str) -> CallFailed:
    """Returns the error for an HTTP status: Overloaded, CallRejected (4xx) or CallFailed."""
    text = f"{name} answered {status}: {message[:MAX_ERROR_CHARS]}"
    if status in BUSY:
        return Overloaded(text)
    return CallRejected(text) if 400 <= status < 500 else CallFailed(text)


def checked_extra_body(where: str, fields: object, reserved: Collection[str]) -> dict[str, Any]:
    """A copy of `fields`. Raises InputError, beginning with `where`, unless it is a dict of JSON without `reserved`."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
        raise InputError(f"{where} must be a dict of request fields, not {fields!r:.80}")
    for name in fields:
        if name in reserved:
            raise InputError(f"{where} cannot set {name!r}, which programs set")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(fields)))
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"{where} must be JSON, not {fields!r:.80}") from None
    return copied
