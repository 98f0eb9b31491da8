"""OpenAI's file and batch objects, and the request that creates a batch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from plait.runtime.server.batches.records import (
    DAY_S,
    BatchProblem,
    BatchRecord,
    Counts,
    Endpoint,
    FileRecord,
    Purpose,
    Status,
)
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


class FileObject(msgspec.Struct):
    """A stored file. `filename` is the client's. `purpose`: batch of an upload, batch_output of results."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, record: FileRecord) -> FileObject:
        """Returns what a client sees of a stored file."""
        return msgspec.convert(record, cls, from_attributes=True)


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


class BatchErrors(msgspec.Struct):
    data: list[BatchProblem]
    object: Literal["list"] = "list"


class InputDetails(msgspec.Struct):
    cached_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct):
    """Tokens of all lines with an answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Batch(msgspec.Struct):
    """A batch. The ids of its result files are there once it has ended, if they have a line. Times: Unix seconds."""

    id: str
    endpoint: Endpoint
    errors: BatchErrors | None
    input_file_id: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None
    usage: BatchUsage
    model: str | UnsetType = UNSET
    completion_window: Literal["24h"] = "24h"
    object: Literal["batch"] = "batch"

    @classmethod
    def of(cls, record: BatchRecord) -> Batch:
        """Returns what a client sees of a batch."""
        times = {name: getattr(record, name) for name in cls.__struct_fields__ if name.endswith("_at")}
        tokens = record.tokens
        return cls(
            id=record.id,
            endpoint=record.endpoint,
            errors=BatchErrors(record.problems) if record.problems else None,
            input_file_id=record.input_file_id,
            status=record.status,
            output_file_id=record.output_id if record.has_ended and record.has_output else None,
            error_file_id=record.error_id if record.has_ended and record.has_errors else None,
            request_counts=record.counts,
            metadata=record.metadata,
            usage=BatchUsage(
                tokens.input,
                InputDetails(tokens.cached),
                tokens.output,
                OutputDetails(tokens.reasoning),
                tokens.input + tokens.output,
            ),
            model=record.model or UNSET,
            **times,
        )


class BatchList(msgspec.Struct):
    """A page of batches."""

    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
