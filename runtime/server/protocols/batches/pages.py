"""What the routes of files and of batches share: query parameters, pages of lists, errors of the disk and of quotas."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from plait.runtime.server.app_state import state_of
from plait.runtime.server.batches.batch_service import BatchService
from plait.runtime.server.batches.directory import disk_problem
from plait.runtime.server.batches.file_store import QUOTA, QuotaExceeded
from plait.runtime.server.errors import INTERNAL, NOT_FOUND, ApiError, invalid
from plait.runtime.server.http.json_body import convert_json
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.shared import StrictStruct


class Paging(StrictStruct):
    """Query parameters of a list."""

    after: str | None = None
    limit: int = 20


Item = TypeVar("Item")


class Page(msgspec.Struct, Generic[Item]):
    """A page of a list."""

    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


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
    return convert_json(dict(request.query_params), kind, is_text=True)


def no_query(request: Request) -> None:
    """Raises ApiError 400 for a request with query parameters."""
    for name in request.query_params:
        raise invalid(f"unknown parameter: '{name[:100]}'", name[:100], "unknown_parameter")


def page(items: Sequence[tuple[str, Any]], query: Paging) -> Response:
    """Returns the items, (id, what is shown), behind `query.after`, at most `query.limit`. Raises ApiError 404."""
    ids, start = [item_id for item_id, _ in items], 0
    if query.after is not None:
        if query.after not in ids:
            raise ApiError(404, f"there is nothing with the id {query.after[:100]!r}", type=NOT_FOUND, param="after")
        start = ids.index(query.after) + 1
    end = start + query.limit
    first, last = (ids[start], ids[:end][-1]) if ids[start:] else (None, None)
    return json_response(Page([shown for _, shown in items[start:end]], end < len(items), first, last))


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
