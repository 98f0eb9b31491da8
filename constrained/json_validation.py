"""Validates a finished JSON text against what the masks of a lenient grammar do not enforce.

The cost grows with the text. References to other documents are never fetched.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

import jsonschema_rs
import msgspec

MAX_REASON = 200
_decoder = json.JSONDecoder()


class Segment(msgspec.Struct, frozen=True):
    """A part of a structural text: JSON between the patterns `begin` and `end`; `schema` is a JSON text."""

    begin: str
    schema: str
    end: str


def segments_validation_error(segments: tuple[Segment, ...], text: str) -> str | None:
    """Returns why a segment of `text` does not match its schema or is not closed; None if all segments are valid.

    >>> segments_validation_error((Segment("<a>", '{"uniqueItems": true}', "</a>"),), "so <a>[1,1]</a>")
    'behind the <a> at 3: [1,1] has non-unique elements (at the top)'
    """
    at = 0
    while True:
        places = [(re.compile(segment.begin).search(text, at), segment) for segment in segments]
        opened = [(begin, segment) for begin, segment in places if begin is not None]
        if not opened:
            return None
        begin, segment = min(opened, key=lambda pair: pair[0].start())
        try:
            _, last = _decoder.raw_decode(text, begin.end())
        except (ValueError, RecursionError) as error:
            return _segment_error(f"not JSON: {error}"[:MAX_REASON], begin)
        end = re.compile(segment.end).match(text, last)
        if end is None:
            return _segment_error("its end does not follow the value", begin)
        reason = json_validation_error(segment.schema, text[begin.end() : last])
        if reason is not None:
            return _segment_error(reason, begin)
        at = end.end()


def _segment_error(reason: str, begin: re.Match[str]) -> str:
    return f"behind the {begin.group()[:50]} at {begin.start()}: {reason}"


def json_validation_error(schema: str, text: str) -> str | None:
    """Returns in one line, with a pointer into the value, why the JSON `text` does not match `schema`; None if it does.

    Its numbers are decimals of any precision, as the schema's are.

    >>> json_validation_error('{"uniqueItems": true}', "[1,1]")
    '[1,1] has non-unique elements (at the top)'
    """
    try:
        value = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"[:MAX_REASON]
    except ArithmeticError:
        return "it could not be checked: an exponent is too large"
    try:
        violation = next(iter(_validator(schema).iter_errors(value)), None)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        return f"it could not be checked: {error}".splitlines()[0][:MAX_REASON]
    if violation is None:
        return None
    location = "/".join(str(step) for step in violation.instance_path)
    return f"{violation.message[:MAX_REASON]} (at {'/' + location if location else 'the top'})"


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    return jsonschema_rs.validator_for(json.loads(schema), validate_formats=True, offline=True)
