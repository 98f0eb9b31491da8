"""Parses the body of a request at once, as `read_json` does in steps."""

from __future__ import annotations

from typing import Any, TypeVar

from plait.runtime.server.http.json_body import convert_json, parse_steps

T = TypeVar("T")


def parse(body: bytes, kind: type[T]) -> T:
    """Parses a body as a `kind`. Raises ApiError 400."""
    decoded: list[Any] = []
    for _ in parse_steps(body, decoded):
        pass
    return convert_json(decoded[0], kind)
