"""Finds the field `warnings` in answers of every protocol, whole and streamed."""

from __future__ import annotations

import json
from typing import Any


def warnings_in(value: Any) -> list[list[str]]:
    """All fields `warnings` within JSON."""
    if isinstance(value, list):
        return [found for item in value for found in warnings_in(item)]
    if not isinstance(value, dict):
        return []
    own = [value["warnings"]] if "warnings" in value else []
    return own + [found for item in value.values() for found in warnings_in(item)]


def warnings_of_stream(text: str) -> list[list[str]]:
    """All fields `warnings` of an answer, or of the events or lines of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return warnings_in([json.loads(line) for line in lines if line.startswith(("{", "[{"))])
