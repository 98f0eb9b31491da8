"""Writes JSON as `json.dumps` does, without stopping other threads for long."""

from __future__ import annotations

import json
from typing import Any

import msgspec

LONG_JSON_BYTES = 1 << 19  # json.dumps of so much takes up to 15 ms, in one call that holds the interpreter's lock


def json_text(value: Any, **options: Any) -> str:
    """Returns `json.dumps(value, **options)`. Other threads run while a long text is written.

    >>> json_text({"é": [1, 2]}, ensure_ascii=False)
    '{"é": [1, 2]}'
    """
    encoder = json.JSONEncoder(**options)
    return "".join(encoder.iterencode(value)) if _is_long(value) else encoder.encode(value)


def _is_long(value: Any) -> bool:
    try:
        return len(msgspec.json.encode(value)) > LONG_JSON_BYTES
    except (TypeError, ValueError, RecursionError):  # what is no JSON, json.dumps refuses
        return False
