"""OpenAI's file and batch objects, and the request that creates a batch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.runtime.server.batches.records import DAY_S, Batch, Endpoint, FileObject
from plait.runtime.server.protocols.shared import StrictStruct

DEFAULT_LIFETIME_S = 30 * DAY_S
Lifetime = Annotated[int, Meta(ge=3600, le=DEFAULT_LIFETIME_S)]


class ExpiresAfter(StrictStruct):
    """When a file is deleted: `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: Lifetime


class FileUpload(StrictStruct):
    """The fields of an upload, a body of multipart/form-data. `file`: JSON lines, the requests of a batch.

    `expires_after` is sent as `expires_after[anchor]` and `expires_after[seconds]`; 30 days by default.
    """

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileList(msgspec.Struct):
    """A page of files."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct):
    """A file that was deleted."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class CreateBatch(StrictStruct):
    """A new batch. `input_file_id`: a file with the purpose batch. `output_expires_after`: of its result files."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchList(msgspec.Struct):
    """A page of batches."""

    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
