"""`/v1/files`: the input and result files of batches. Each API key sees its own files only.

Source: https://platform.openai.com/docs/api-reference/files.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.runtime.server.app_state import tenant_of
from plait.runtime.server.batches.directory import open_stored, run_to_end
from plait.runtime.server.batches.records import FileObject, Purpose, shown
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.batches.batches import CHANGE_ERRORS, READ_ERRORS
from plait.runtime.server.protocols.batches.pages import Paging, disk_errors, no_query, page, read_query, service_of
from plait.runtime.server.protocols.batches.types import DeletedFile, FileList, FileUpload
from plait.runtime.server.protocols.batches.upload import receive_upload

router = APIRouter()

SENT_BYTES = 1 << 18  # at once


class FileQuery(Paging):
    """Query parameters of a list of files, which begins with the newest unless `order` is asc."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: Purpose | None = None


@router.post(
    "/v1/files", **documented(FileUpload, FileObject, errors=CHANGE_ERRORS, request_media_type="multipart/form-data")
)
async def upload_file(request: Request) -> Response:
    """Stores a file of requests for a batch."""
    with disk_errors():
        return json_response(shown(await receive_upload(request, service_of(request).files), FileObject))


@router.get("/v1/files", **documented(answer=FileList, errors=READ_ERRORS, query=FileQuery))
async def list_files(request: Request) -> Response:
    """The files of the caller's key."""
    query = read_query(request, FileQuery)
    records = service_of(request).files.of_tenant(tenant_of(request))
    items = [(record.id, shown(record, FileObject)) for record in records if query.purpose in (None, record.purpose)]
    return page(items if query.order == "asc" else items[::-1], query, FileList)


@router.get("/v1/files/{file_id}", **documented(answer=FileObject, errors=READ_ERRORS))
async def get_file(request: Request, file_id: str) -> Response:
    """What is known about one file."""
    no_query(request)
    return json_response(shown(service_of(request).files.get(tenant_of(request), file_id), FileObject))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    **documented(answer=str, errors=READ_ERRORS, media_type="application/octet-stream"),
)
async def get_content(request: Request, file_id: str) -> Response:
    """The bytes of one file."""
    no_query(request)
    files = service_of(request).files
    record = files.get(tenant_of(request), file_id)
    with disk_errors(is_reading=True):
        descriptor = open_stored(files.content_path(record.id))
    return _FileContent(descriptor, record.bytes)


@router.delete("/v1/files/{file_id}", **documented(answer=DeletedFile, errors=CHANGE_ERRORS))
async def delete_file(request: Request, file_id: str) -> Response:
    """Deletes one file."""
    no_query(request)
    with disk_errors():
        await service_of(request).delete_file(tenant_of(request), file_id)
    return json_response(DeletedFile(file_id))


class _FileContent(Response):
    """Sends an open file of `size` bytes, and closes it."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(media_type="application/octet-stream")
        self._descriptor = descriptor
        self.headers["content-length"] = str(size)
        self.headers["content-disposition"] = "attachment"  # so that no browser shows it as a page of this server
        self.headers["x-content-type-options"] = "nosniff"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while data := await run_to_end(os.read, self._descriptor, SENT_BYTES):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            os.close(self._descriptor)
