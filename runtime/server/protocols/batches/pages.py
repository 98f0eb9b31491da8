"""Query parameters, and the pages of lists: `after`, `limit` and `order`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from plait.runtime.server.app_state import state_of
from plait.runtime.server.batches.batch_service import BatchService
from plait.runtime.server.errors import NOT_FOUND, ApiError, invalid
from plait.runtime.server.http.json_body import convert_json


class HasId(Protocol):
    """An item of a list."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)
Q = TypeVar("Q", bound=msgspec.Struct)


def service_of(request: Request) -> BatchService:
    """Returns the server's files and batches. Raises ApiError 404 for a server that keeps none."""
    service = state_of(request).batches
    if service is None:
        text = "this server keeps no files and batches; its operator can name a directory with --files-dir"
        raise ApiError(404, text, type=NOT_FOUND, code="files_not_enabled")
    service.start()
    return service


def read_query(request: Request, kind: type[Q]) -> Q:
    """Returns the query parameters as a struct. Raises ApiError 400 for one that is unknown or wrong."""
    items: Mapping[str, Any] = request.query_params
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in items.items():
        values[name] = as_integer(value) if "int" in str(fields.get(name)) else value
    return convert_json(values, kind)


def as_integer(text: str) -> int | str:
    """Returns an integer of a query or a form; any other text as it is, for the error that names its field."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 1000 else text


def no_query(request: Request) -> None:
    """Raises ApiError 400 for a request with query parameters."""
    for name in request.query_params:
        raise invalid(f"unknown parameter: '{name[:100]}'", name[:100], "unknown_parameter")


def page(items: Sequence[T], after: str | None, limit: int) -> tuple[list[T], bool]:
    """Returns the items behind `after`, at most `limit`, and whether more follow. Raises ApiError 404."""
    start = 0
    if after is not None:
        places = [index for index, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(404, f"there is nothing with the id {after[:100]!r}", type=NOT_FOUND, param="after")
        start = places[0] + 1
    return list(items[start : start + limit]), start + limit < len(items)
