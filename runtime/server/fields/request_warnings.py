"""The warnings of a request: fields that were accepted and are not acted on.

With strict fields (`--strict-fields`, and lines of batches) each is an error instead. `RequestHandle.warnings` adds the
warnings of calls.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from plait.runtime.server.errors import unknown_field, unsupported
from plait.runtime.server.in_flight import current_request

FieldClass = Literal["advice", "unknown"]
UNKNOWN: FieldClass = "unknown"
MAX_WARNINGS = 64  # fields that are listed: lists in a body may be long


def warn(param: str, reason: str, kind: FieldClass = "advice") -> None:
    """Adds a warning that the field `param` has no effect, once, and for the first MAX_WARNINGS. `reason`: a clause.

    Raises ApiError 400 with strict fields.
    """
    record = current_request()
    if record is None:
        return
    if record.strict_fields:
        raise unknown_field(param) if kind == UNKNOWN else unsupported(param, f"has no effect here: {reason}")
    text = f"'{param}' has no effect: {reason}"
    if len(record.warnings) >= MAX_WARNINGS and text not in record.warnings:
        text = "further fields have no effect, which are not listed"
    record.warnings.setdefault(text, kind)


def request_warnings() -> list[str] | UnsetType:
    """The warnings of the current request, for an answer without calls."""
    record = current_request()
    return list(record.warnings) or UNSET if record is not None else UNSET
