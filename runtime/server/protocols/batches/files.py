"""`/v1/files`: the input and result files of batches. Each API key sees its own files only.

Source: https://platform.openai.com/docs/api-reference/files.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.runtime.results.result_file import write_all
from plait.runtime.server.app_state import tenant_of
from plait.runtime.server.batches.directory import open_stored, run_to_end
from plait.runtime.server.batches.file_store import FileStore
from plait.runtime.server.batches.records import FileObject, FileRecord, Purpose, shown
from plait.runtime.server.errors import ApiError, invalid
from plait.runtime.server.http.json_body import convert_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import ClientDisconnected, json_response
from plait.runtime.server.protocols.batches.batches import CHANGE_ERRORS, DEFAULT_LIFETIME_S, READ_ERRORS, ExpiresAfter
from plait.runtime.server.protocols.batches.pages import (
    Page,
    Paging,
    disk_errors,
    no_query,
    page,
    read_query,
    service_of,
)
from plait.runtime.server.protocols.shared import StrictStruct

router = APIRouter()

SENT_BYTES = 1 << 18  # at once


class FileUpload(StrictStruct):
    """The fields of an upload, a body of multipart/form-data. `file`: JSON lines, the requests of a batch.

    `expires_after` is sent as `expires_after[anchor]` and `expires_after[seconds]`; 30 days by default.
    """

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileList(Page[FileObject]):
    """A page of files."""


class DeletedFile(msgspec.Struct):
    """A file that was deleted."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


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
    return page(items if query.order == "asc" else items[::-1], query)


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


# -- upload ---------------------------------------------------------------------------------------
# Receives an upload: a multipart/form-data body, whose file is written to disk as it arrives.
#
# Nothing of the request becomes a path: the file gets an id of the server's, the client's name is only stored.

FORM_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255
WRITE_BYTES = 1 << 20  # at once


async def receive_upload(request: Request, files: FileStore) -> FileRecord:
    """Stores the file of an upload and returns its record.

    Raises ApiError for a wrong body, QuotaExceeded, and OSError if the file cannot be written.
    """
    tenant = tenant_of(request)
    form = _Form(_boundary(request))
    max_bytes, max_lines = files.settings.max_file_bytes, files.settings.max_batch_lines
    num_bytes = 0
    with files.new_upload() as (file_id, descriptor):
        files.reserve(tenant, num_files=1)
        try:
            async for piece in _pieces(request, form):
                if num_bytes + len(piece) > max_bytes:
                    text = f"the file is larger than {max_bytes} bytes"
                    raise ApiError(413, text, param="file", code="file_too_large", headers={"Connection": "close"})
                files.reserve(tenant, len(piece))
                num_bytes += len(piece)
                form.num_lines += piece.count(b"\n")
                if form.num_lines > max_lines:
                    raise invalid(f"the file has more than {max_lines} lines", "file", "too_many_lines")
                await run_to_end(write_all, descriptor, piece)
            upload = form.checked()
            lifetime_s = DEFAULT_LIFETIME_S if upload.expires_after is None else upload.expires_after.seconds
            await run_to_end(os.fsync, descriptor)
            record = await run_to_end(files.add, file_id, tenant, "batch", form.filename, lifetime_s)
        finally:
            if not files.has(file_id):
                files.reserve(tenant, -num_bytes, -1)
    return record


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        text = "the body must be multipart/form-data with a boundary, and the header content-type must say so"
        raise ApiError(415, text, code="unsupported_media_type")
    return options[b"boundary"]


async def _pieces(request: Request, form: _Form) -> AsyncIterator[bytes]:
    """Yields the bytes of the file as they arrive, in pieces of about 1 MiB."""
    try:
        async for data in request.stream():
            form.feed(data)
            if len(form.file_bytes) >= WRITE_BYTES:
                yield form.take()
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    form.finish()
    if form.file_bytes:
        yield form.take()


class _Form:
    """Parses a form. Fields are kept, the bytes of its file are taken with `take()`."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, bytearray] = {}
        self.file_bytes = bytearray()
        self.filename, self.num_lines, self._has_file, self._is_complete = "", 0, False, False
        self._header_name, self._header_value, self._disposition = bytearray(), bytearray(), b""
        self._field: bytearray | None = None  # of the present part; None: the file
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_data,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _malformed(error) from None

    def feed(self, data: bytes) -> None:
        """Parses a piece of the body. Raises ApiError 400."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from None

    def finish(self) -> None:
        """Ends the body. Raises ApiError 400 for one that is not complete."""
        if not self._is_complete:
            raise invalid("the body ends before the end of its form", code="invalid_form")

    def take(self) -> bytes:
        """Returns the bytes of the file that have arrived since the last call."""
        data = bytes(self.file_bytes)
        self.file_bytes.clear()
        return data

    def checked(self) -> FileUpload:
        """Returns the fields. Raises ApiError 400 for one that is missing or wrong."""
        values: dict[str, Any] = {"file": ""} if self._has_file else {}
        for name, data in self.fields.items():
            text = data.decode("utf-8", "replace")
            outer, _, inner = name.partition("[")
            if inner:
                values.setdefault(outer, {})[inner.rstrip("]")] = text
            else:
                values[name] = text
        return convert_json(values, FileUpload, is_text=True)

    # -- the parser's callbacks -------------------------------------------------------------------

    def _on_part_begin(self) -> None:
        self._disposition = b""

    def _on_header_end(self) -> None:
        if bytes(self._header_name).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name in self.fields or (name == "file" and self._has_file):
            raise invalid(f"the field '{name}' is there twice", name)
        if name == "file":
            text = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = "".join(filter(str.isprintable, text))[:MAX_NAME_CHARS] or "file"
            self._has_file, self._field = True, None
        elif name in FORM_FIELDS:
            self._field = self.fields[name] = bytearray()
        else:
            text = f"unknown parameter: '{name[:100]}'; an upload has file, {', '.join(FORM_FIELDS)}"
            raise invalid(text, name[:100], "unknown_parameter")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.file_bytes += data[start:end]
        elif len(self._field) + end - start > MAX_FIELD_BYTES:
            raise invalid(f"a field of the form is longer than {MAX_FIELD_BYTES} bytes", code="invalid_form")
        else:
            self._field += data[start:end]

    def _on_end(self) -> None:
        self._is_complete = True


def _malformed(error: FormParserError) -> ApiError:
    return invalid(f"the body is no valid multipart/form-data: {str(error)[:200]}", code="invalid_form")
