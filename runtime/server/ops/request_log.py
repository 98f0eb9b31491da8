"""The log: one line per request, and whatever else the server has to say, as JSON lines or for a person's eye.

A request's line holds no text of its prompt or answer, unless the operator asked for the body's beginning.

Knows: records, logging. Must not know: ASGI.
"""

from __future__ import annotations

import logging
import sys
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from plait.runtime.server.in_flight import RequestRecord

LogFormat = Literal["json", "text"]
REQUESTS = "plait.requests"

log = logging.getLogger(REQUESTS)


def set_up_log(form: LogFormat) -> None:
    """Sends everything from INFO on to standard error in this form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if form == "json" else _Text())
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line says these
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_request(record: RequestRecord) -> None:
    """One line for a request that is over."""
    if log.isEnabledFor(logging.INFO):
        facts = request_log_fields(record)
        said = (record.method, record.route, facts["status"])
        line = log.makeRecord(REQUESTS, logging.INFO, "", 0, "%s %s %s", said, None, extra={"facts": facts})
        log.handle(line)  # log.info would look for the place that it was called from, which no line says


def request_log_fields(record: RequestRecord) -> dict[str, Any]:
    """What the line says. Times in seconds; what a client chose itself is cut short."""
    usages = [usage for _, usage in record.usages()]
    facts: dict[str, Any] = {
        "request_id": record.request_id,
        "client_request_id": record.client_request_id or None,
        "trace_id": record.trace_id or None,
        "method": record.method,
        "route": record.route,
        "path": None if record.route == record.path else record.path[:200],
        "status": 499 if record.client_gone or not record.status else record.status,
        "error": record.code,
        "key": record.tenant or None,
        "wall_s": round(record.wall_s, 4),
        "first_byte_s": None
        if record.first_byte_time is None
        else round(record.first_byte_time - record.start_time, 4),
    }
    if usages:
        facts |= {
            "queue_s": round(max(usage.queue_s for usage in usages), 4),
            "ttft_s": round(min(usage.ttft_s for usage in usages), 4),
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            "forced_tokens": sum(usage.forced_tokens for usage in usages),
        }
    elif record.calls:
        facts["completion_tokens"] = record.num_tokens
    if record.body_preview:
        facts["body"] = record.body_preview.decode("utf-8", "replace")
    return {name: value for name, value in facts.items() if value is not None}


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _utc(record.created), "level": record.levelname.lower(), "logger": record.name}
        facts = getattr(record, "facts", None)
        if facts is not None:
            line |= facts
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode("utf-8", "replace")


class _Text(logging.Formatter):
    """For a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}"
        if record.levelno > logging.INFO:
            line = f"{line[:8]} {record.levelname}{line[8:]}"
        if (facts := getattr(record, "facts", None)) is not None:
            line += _summary(facts)
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


def _summary(facts: dict[str, Any]) -> str:
    parts = [f"{facts['wall_s']:.3f} s"]
    if "prompt_tokens" in facts:
        parts.append(f"{facts['prompt_tokens']} tokens in ({facts['cached_tokens']} cached)")
    if "completion_tokens" in facts:
        parts.append(f"{facts['completion_tokens']} out")
    if "error" in facts:
        parts.append(facts["error"])
    return f"  {', '.join(parts)}  {facts['request_id']}" + (f"\n  {facts['body']!r}" if "body" in facts else "")


def _utc(seconds: float) -> str:
    whole, thousandth = divmod(int(seconds * 1000), 1000)
    return f"{_second(whole)}.{thousandth:03d}Z"


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
