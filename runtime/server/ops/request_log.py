"""The server's log: a line per request and all other messages, as JSON lines or as text for a terminal.

A request's line holds no text of its prompt or output, except for the beginning of its body with --log-prompts.
"""

from __future__ import annotations

import json
import logging
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from plait.runtime.server.ops.log_output import log_to_standard_error

if TYPE_CHECKING:
    from plait.runtime.server.in_flight import RequestRecord

LogFormat = Literal["json", "text"]
REQUESTS = "plait.requests"
CAPACITY_CODES = frozenset({"queue_full", "rate_limit_exceeded"})
MAX_REFUSAL_LINES_PER_S = 10

log = logging.getLogger(REQUESTS)


def set_up_log(log_format: LogFormat) -> None:
    """Writes log records from INFO up to standard error in this format."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # in no line
    log_to_standard_error(_JsonLines() if log_format == "json" else _Text())


class RequestLog:
    """Logs the requests of one server. Of those refused for lack of capacity only the first ones of each second.

    Under overload they are most of all requests, and a line costs as much as the rest of a refusal. The next line has
    the number of refusals before it that have none, as `unlogged_refusals`.
    """

    def __init__(self) -> None:
        self._second = self._num_logged = self._num_unlogged = 0

    def add(self, record: RequestRecord) -> None:
        """Logs a request that has ended."""
        if record.code in CAPACITY_CODES and not self._may_log_refusal():
            self._num_unlogged += 1
            return
        _log_request(record, self._num_unlogged)
        self._num_unlogged = 0

    def _may_log_refusal(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._num_logged = second, 0
        self._num_logged += 1
        return self._num_logged <= MAX_REFUSAL_LINES_PER_S


def _log_request(record: RequestRecord, num_unlogged: int) -> None:
    if log.isEnabledFor(logging.INFO):
        fields = request_log_fields(record)
        if num_unlogged:
            fields["unlogged_refusals"] = num_unlogged
        path = record.route if "path" not in fields else json.dumps(fields["path"])[1:-1]  # without control characters
        arguments = (record.method, path, fields["status"])
        line = log.makeRecord(REQUESTS, logging.INFO, "", 0, "%s %s %s", arguments, None, extra={"fields": fields})
        log.handle(line)  # log.info would look up the caller's file and line, which no line shows


def request_log_fields(record: RequestRecord) -> dict[str, Any]:
    """Returns the fields of a request's line. Times are in seconds; strings of the client are truncated."""
    usages = [usage for _, usage in record.usages()]
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "client_request_id": record.client_request_id or None,
        "trace_id": record.trace_id or None,
        "session_id": record.session_id or None,
        "method": record.method,
        "route": record.route,
        "path": None if record.route == record.path else record.path[:200],
        "status": 499 if record.client_gone or not record.status else record.status,
        "error": record.code,
        "key": record.tenant or None,
        "adapter": record.adapter or None,
        "runs": record.num_runs if record.num_runs > 1 else None,
        "wall_s": round(record.wall_s, 4),
        "first_byte_s": None
        if record.first_byte_time is None
        else round(record.first_byte_time - record.start_time, 4),
    }
    if usages:
        fields |= {
            "queue_s": round(record.wait_s + max(usage.queue_s for usage in usages), 4),
            "ttft_s": round(min(usage.ttft_s for usage in usages), 4),
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            "forced_tokens": sum(usage.forced_tokens for usage in usages),
        }
    elif record.calls:
        fields["completion_tokens"] = record.num_tokens
    if record.body_preview:
        fields["body"] = record.body_preview.decode("utf-8", "replace")
    return {name: value for name, value in fields.items() if value is not None}


class _JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _utc(record.created), "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, "fields", None)
        if fields is not None:
            line |= fields
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode("utf-8", "replace")


class _Text(logging.Formatter):
    """Formats a record for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}"
        if record.levelno > logging.INFO:
            line = f"{line[:8]} {record.levelname}{line[8:]}"
        if (fields := getattr(record, "fields", None)) is not None:
            line += _summary(fields)
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


def _summary(fields: dict[str, Any]) -> str:
    parts = [f"{fields['wall_s']:.3f} s"]
    if "prompt_tokens" in fields:
        parts.append(f"{fields['prompt_tokens']} tokens in ({fields['cached_tokens']} cached)")
    if "completion_tokens" in fields:
        parts.append(f"{fields['completion_tokens']} out")
    if "error" in fields:
        parts.append(fields["error"])
    if "unlogged_refusals" in fields:
        parts.append(f"{fields['unlogged_refusals']} refusals before it")
    return f"  {', '.join(parts)}  {fields['request_id']}" + (f"\n  {fields['body']!r}" if "body" in fields else "")


def _utc(seconds: float) -> str:
    second, millisecond = divmod(int(seconds * 1000), 1000)
    return f"{_utc_second(second)}.{millisecond:03d}Z"


@lru_cache(maxsize=2)
def _utc_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
