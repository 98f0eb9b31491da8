"""Decodes a request's JSON body into a typed struct, or raises a 400 error that names the wrong field.

The parser is strict: NaN, infinities, invalid UTF-8, lone surrogates, deep nesting, integers beyond 64 bits and
duplicate keys are refused, so the code behind it never sees them. The work is done in pieces, between which the event
loop serves other requests; `json_limits` bounds the one piece that cannot be divided, the parser itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from plait.runtime.server.errors import ApiError, invalid, unknown_field
from plait.runtime.server.fields.field_hints import allowed_values, unknown_field_hint
from plait.runtime.server.fields.request_fields import read_fields
from plait.runtime.server.http.hosts_and_origins import is_from_browser
from plait.runtime.server.http.json_limits import JsonScan, scan_steps
from plait.runtime.server.http.response import ClientDisconnected

T = TypeVar("T")

MAX_DEPTH = 128
MAX_INTEGER = 2**63 - 1
SMALL_BODY_BYTES = 1 << 14  # parsed at once
CHECKED_PER_STEP = 20_000  # values of a decoded body
UNTYPED = ("", "application/octet-stream", "application/x-www-form-urlencoded")  # none, a library's, `curl -d`'s
VALUES_PER_CONTAINER = 8  # whose check takes as long as that of an array or object itself
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)
_CONTENT_PART_TYPE = re.compile(r"(?:.*\.)?content\[\d+\]\.type")


async def read_json(request: Request, kind: type[T], *, may_be_untyped: bool = False) -> T:
    """Reads the body as a `kind`. Fields that are accepted and not read become warnings; see `request_fields.py`.

    may_be_untyped: see `check_content_type`.

    Raises ApiError: 415 for another content type or none, 400 with the path of a wrong field. Raises ClientDisconnected
    if the client leaves before the body has arrived.
    """
    check_content_type(request, may_be_untyped=may_be_untyped)
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    decoded: list[Any] = []
    for _ in parse_steps(body, decoded):
        if len(body) > SMALL_BODY_BYTES:
            await asyncio.sleep(0)
    value = convert_json(read_fields(decoded[0], kind), kind)
    if len(body) > SMALL_BODY_BYTES:
        await asyncio.sleep(0)
    return value


def check_content_type(request: Request, *, may_be_missing: bool = False, may_be_untyped: bool = False) -> None:
    """Raises ApiError 415 unless the header content-type is application/json, or missing where it may be.

    may_be_untyped: it may be one of UNTYPED, as clients of Ollama send it, from programs only.
    """
    content_type = request.headers.get("content-type")
    if content_type is None and may_be_missing:
        return
    content_type = (content_type or "").partition(";")[0].strip().lower()
    if may_be_untyped and content_type in UNTYPED and not is_from_browser(request.scope):
        return
    if content_type != "application/json":
        text = "the body must be application/json, and the header content-type must say so; with curl: "
        raise ApiError(415, text + "-H 'Content-Type: application/json'", code="unsupported_media_type")


def parse_steps(body: bytes, decoded: list[Any]) -> Iterator[None]:
    """Appends the value of a body to `decoded`, in steps of milliseconds. Raises ApiError 400."""
    scan = JsonScan()
    yield from scan_steps(body, scan)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(_json_problem(body, str(error)), code="invalid_json") from None
    yield
    yield from _check_steps(value, scan.num_keys)
    yield
    decoded.append(value)


def _json_problem(body: bytes, parser_text: str) -> str:
    """Returns why a body is no JSON. The parser calls an empty body, and half of a surrogate pair, truncated."""
    if not body or body.isspace():
        return "the body is empty"
    hint = ", or a text holds half of a surrogate pair, which is not a character" if "truncated" in parser_text else ""
    return f"the body is not valid JSON: {parser_text[:200]}{hint}"


def convert_json(value: Any, kind: type[T], path: str = "", *, is_text: bool = False) -> T:
    """Converts decoded JSON at `path` of a body to a `kind`. Raises ApiError 400 with the wrong field's path.

    is_text: the values of a query or a form, whose numbers are text.
    """
    try:
        return msgspec.convert(value, kind, strict=not is_text)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), path, kind) from None


def _check_steps(value: Any, num_keys_of_body: int) -> Iterator[None]:
    """Checks a decoded body level by level for its depth, integers beyond 64 bits, and duplicate keys.

    A duplicate key shows as a difference between the keys in `value` and those in the body.
    """
    level, num_keys, num_unchecked = [value], 0, 0
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
        for container in level:
            num_unchecked += VALUES_PER_CONTAINER
            if isinstance(container, dict):
                num_keys += len(container)
                items = list(container.values())
            else:
                items = container if isinstance(container, list) else [container]
            for start in range(0, len(items), CHECKED_PER_STEP):
                next_level += _checked_items(items[start : start + CHECKED_PER_STEP])
                num_unchecked += min(len(items) - start, CHECKED_PER_STEP)
                if num_unchecked >= CHECKED_PER_STEP:
                    num_unchecked = 0
                    yield
        if not next_level:
            break
        level = next_level
    else:
        raise _too_deep()
    if num_keys != num_keys_of_body:
        raise invalid("an object has a duplicate key", code="invalid_json")


def _checked_items(items: list[Any]) -> list[Any]:
    """Returns the arrays and objects among `items`. Raises ApiError 400 for an integer beyond 64 bits."""
    kinds = set(map(type, items))
    integers = items if kinds == {int} else [item for item in items if type(item) is int] if int in kinds else []
    if integers and (max(integers) > MAX_INTEGER or min(integers) < -MAX_INTEGER):
        raise invalid("the body holds an integer beyond 64 bits", code="invalid_json")
    if dict in kinds or list in kinds:
        return [item for item in items if isinstance(item, dict | list)]
    return []


def _too_deep() -> ApiError:
    return invalid(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _validation_error(text: str, path: str, kind: Any) -> ApiError:
    """Converts msgspec's message, such as "Expected `str`, got `int` - at `$.messages[0].content`", about a `kind`."""
    problem, _, subpath = text.partition(" - at `")
    path_in_kind = subpath.rstrip("`").removeprefix("$").removeprefix(".")
    param = (path + subpath.rstrip("`").removeprefix("$")).removeprefix(".")
    for pattern in (_UNKNOWN, _MISSING):
        if match := pattern.match(problem):
            name = f"{param}.{match[1][:100]}" if param else match[1][:100]
            if pattern is _UNKNOWN:
                return unknown_field(name, unknown_field_hint(kind, path_in_kind, match[1][:100]))
            return invalid(f"missing required parameter: '{name}'", name, "missing_required_parameter")
    if _CONTENT_PART_TYPE.fullmatch(param):
        problem = f"content parts must be text; {problem[:1].lower()}{problem[1:]}"
    elif problem.startswith("Invalid "):
        problem += allowed_values(kind, path_in_kind)
    return invalid(f"'{param}': {problem}" if param else problem, param or None)
