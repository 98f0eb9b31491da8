"""A request's body as a typed struct, or a 400 that names the place: JSON is read strictly, and once.

NaN, infinities, broken UTF-8, lone surrogates, deep nesting and keys given twice are refused here, so that nothing
behind this file meets them.

Knows: JSON and structs. Must not know: what the fields mean.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from plait.runtime.server.errors import ApiError, invalid

T = TypeVar("T")

MAX_DEPTH = 128
MAX_INTEGER = 2**63 - 1
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)
_BAD_PART = re.compile(r"(?:.*\.)?content\[\d+\]\.type")


async def read_json(request: Request, kind: type[T]) -> T:
    """The body as a `kind`. Raises ApiError: 415 for another content type, 400 with the path of what does not fit."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "the body must be application/json", code="unsupported_media_type")
    return parse(await request.body(), kind)


def parse(body: bytes, kind: type[T]) -> T:
    """`read_json` for bytes that are here.

    >>> parse(b'{"a": 1}', dict[str, int])
    {'a': 1}
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    _check_nesting_and_keys(body, value)
    return convert_json(value, kind)


def convert_json(value: Any, kind: type[T], at: str = "") -> T:
    """`value`, JSON that stands at the path `at` of a body, as a `kind`. ApiError names the place that does not fit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), at) from None


def _check_nesting_and_keys(body: bytes, value: Any) -> None:
    """Level by level over the containers: depth, integers beyond 64 bits, and keys that were given twice."""
    level, num_keys = [value], 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                num_keys += len(container)
                items = list(container.values())
            else:
                items = container if isinstance(container, list) else [container]
            kinds = set(map(type, items))
            if int in kinds:
                _check_integers(items)
            if dict in kinds or list in kinds:
                below += [item for item in items if isinstance(item, dict | list)]
        if not below:
            break
        level = below
    else:
        raise _too_deep()
    if num_keys != _num_keys(body):
        raise invalid("a key is given twice in one object", code="invalid_json")


def _num_keys(body: bytes) -> int:
    """How many keys stand in `body`, valid JSON: strings that a colon follows. In bulk, since there may be millions."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins and ends strings
    outside = b'"'.join(body.split(b'"')[::2])
    return outside.translate(None, b" \t\r\n").count(b'":')


def _check_integers(items: list[Any]) -> None:
    for item in items:
        if type(item) is int and abs(item) > MAX_INTEGER:
            raise invalid("the body holds an integer beyond 64 bits", code="invalid_json")


def _too_deep() -> ApiError:
    return invalid(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _validation_error(text: str, at: str) -> ApiError:
    """msgspec's sentence, its path as a client would write it: "... - at `$.messages[0].content`"."""
    what, _, path = text.partition(" - at `")
    param = (at + path.rstrip("`").removeprefix("$")).removeprefix(".")
    for pattern, sentence, code in (
        (_UNKNOWN, "unknown parameter", "unknown_parameter"),
        (_MISSING, "missing required parameter", "missing_required_parameter"),
    ):
        if found := pattern.match(what):
            name = f"{param}.{found[1][:100]}" if param else found[1][:100]
            return invalid(f"{sentence}: '{name}'", name, code)
    if _BAD_PART.fullmatch(param):
        what = f"content parts must be text; {what[:1].lower()}{what[1:]}"
    return invalid(f"'{param}': {what}" if param else what, param or None)
