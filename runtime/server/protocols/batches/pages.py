"""What the routes of files and of batches share: query parameters, pages of lists, errors of the disk and of quotas."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from plait.runtime.server.app_state import state_of
from plait.runtime.server.batches.batch_service import BatchService
from plait.runtime.server.batches.directory import disk_problem
from plait.runtime.server.batches.file_store import QUOTA, QuotaExceeded
from plait.runtime.server.batches.records import BatchRecord, FileRecord, shown
from plait.runtime.server.errors import INTERNAL, NOT_FOUND, ApiError, invalid
from plait.runtime.server.http.json_body import convert_json
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.shared import StrictStruct


class Paging(StrictStruct):
    """Query parameters of a list."""

    after: str | None = None
    limit: int = 20


R = TypeVar("R", FileRecord, BatchRecord)
T = TypeVar("T", bound=msgspec.Struct)
log = logging.getLogger("plait.server")


def service_of(request: Request) -> BatchService:
    """Returns the server's files and batches. Raises ApiError 404 for a server that keeps none."""
    service = state_of(request).batches
    if service is None:
        text = "this server keeps no files and batches; its operator can name a directory with --files-dir"
        raise ApiError(404, text, type=NOT_FOUND, code="files_not_enabled")
    service.start()
    return service


def read_query(request: Request, kind: type[T]) -> T:
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


def page(records: Sequence[R], query: Paging, kind: type[T], list_kind: Callable[..., msgspec.Struct]) -> Response:
    """Returns the records behind `query.after`, at most `query.limit`, as a list of `kind`. Raises ApiError 404."""
    start = 0
    if query.after is not None:
        places = [index for index, record in enumerate(records) if record.id == query.after]
        if not places:
            raise ApiError(404, f"there is nothing with the id {query.after[:100]!r}", type=NOT_FOUND, param="after")
        start = places[0] + 1
    found = records[start : start + query.limit]
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    has_more = start + query.limit < len(records)
    return json_response(list_kind([shown(record, kind) for record in found], has_more, first, last))


@contextlib.contextmanager
def disk_errors(*, is_reading: bool = False) -> Iterator[None]:
    """Raises ApiError 507 in place of an OSError of the block, 500 if it reads, and 403 in place of QuotaExceeded."""
    try:
        yield
    except QuotaExceeded as error:
        raise ApiError(403, str(error), code=QUOTA) from None
    except OSError as error:
        log.error("the server cannot %s a file or a batch: %s", "read" if is_reading else "store", error)
        if is_reading:
            text = "the server cannot read this file; see its log"
            raise ApiError(500, text, type=INTERNAL, code="storage_error") from error
        code, text = disk_problem(error)
        raise ApiError(507, text, type=INTERNAL, code=code) from error
