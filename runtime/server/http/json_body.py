"""Decodes a request's JSON body into a typed struct, or raises a 400 error that names the wrong field.

The parser is strict: NaN, infinities, invalid UTF-8, lone surrogates, deep nesting, integers beyond 64 bits and
duplicate keys are refused, so the code behind it never sees them.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from plait.runtime.server.errors import ApiError, invalid
from plait.runtime.server.http.response import ClientDisconnected

T = TypeVar("T")

MAX_DEPTH = 128
MAX_INTEGER = 2**63 - 1
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)
_CONTENT_PART_TYPE = re.compile(r"(?:.*\.)?content\[\d+\]\.type")


async def read_json(request: Request, kind: type[T]) -> T:
    """Reads the body as a `kind`.

    Raises ApiError: 415 for another content type or none, 400 with the path of a wrong field. Raises ClientDisconnected
    if the client leaves before the body has arrived.
    """
    check_content_type(request)
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    return parse(body, kind)


def check_content_type(request: Request, *, may_be_missing: bool = False) -> None:
    """Raises ApiError 415 unless the header content-type is application/json, or missing where it may be."""
    content_type = request.headers.get("content-type")
    if content_type is None and may_be_missing:
        return
    if (content_type or "").partition(";")[0].strip().lower() != "application/json":
        text = "the body must be application/json, and the header content-type must say so"
        raise ApiError(415, text, code="unsupported_media_type")


def parse(body: bytes, kind: type[T]) -> T:
    """Parses a body as a `kind`. Raises ApiError 400.

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


def convert_json(value: Any, kind: type[T], path: str = "") -> T:
    """Converts decoded JSON at `path` of a body to a `kind`. Raises ApiError 400 with the wrong field's path."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), path) from None


def _check_nesting_and_keys(body: bytes, value: Any) -> None:
    """Checks a decoded body level by level for its depth, integers beyond 64 bits, and duplicate keys.

    A duplicate key shows as a difference between the keys in `value` and those in `body`.
    """
    level, num_keys = [value], 0
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
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
                next_level += [item for item in items if isinstance(item, dict | list)]
        if not next_level:
            break
        level = next_level
    else:
        raise _too_deep()
    if num_keys != _num_keys(body):
        raise invalid("an object has a duplicate key", code="invalid_json")


def _num_keys(body: bytes) -> int:
    """Counts the keys in valid JSON: the strings before a colon. Uses bulk operations: there may be millions."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
    outside = b'"'.join(body.split(b'"')[::2])
    return outside.translate(None, b" \t\r\n").count(b'":')


def _check_integers(items: list[Any]) -> None:
    for item in items:
        if type(item) is int and abs(item) > MAX_INTEGER:
            raise invalid("the body holds an integer beyond 64 bits", code="invalid_json")


def _too_deep() -> ApiError:
    return invalid(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _validation_error(text: str, path: str) -> ApiError:
    """Converts msgspec's message, such as "Expected `str`, got `int` - at `$.messages[0].content`"."""
    problem, _, subpath = text.partition(" - at `")
    param = (path + subpath.rstrip("`").removeprefix("$")).removeprefix(".")
    for pattern, message, code in (
        (_UNKNOWN, "unknown parameter", "unknown_parameter"),
        (_MISSING, "missing required parameter", "missing_required_parameter"),
    ):
        if match := pattern.match(problem):
            name = f"{param}.{match[1][:100]}" if param else match[1][:100]
            return invalid(f"{message}: '{name}'", name, code)
    if _CONTENT_PART_TYPE.fullmatch(param):
        problem = f"content parts must be text; {problem[:1].lower()}{problem[1:]}"
    return invalid(f"'{param}': {problem}" if param else problem, param or None)
