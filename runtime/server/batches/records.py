"""What is stored about each file and each batch: OpenAI's objects, and what their clients do not see."""

from __future__ import annotations

import secrets
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

T = TypeVar("T", bound=msgspec.Struct)

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["failed", "completed", "expired", "cancelled"]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
DAY_S = 86_400


class FileObject(msgspec.Struct, kw_only=True):
    """A stored file. `filename` is the client's. `purpose`: batch of an upload, batch_output of results."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileRecord(FileObject, kw_only=True, forbid_unknown_fields=True):
    """A `FileObject` as it is stored. Times are Unix seconds. `tenant`: the API key's name."""

    tenant: str


class BatchProblem(msgspec.Struct, kw_only=True):
    """Why a batch failed. `line`: of its input, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFailed(Exception):
    """The batch cannot be continued, or its input is wrong."""

    def __init__(self, *problems: BatchProblem) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


def failure(code: str, text: str) -> BatchFailed:
    """Returns the error of a batch that fails for one reason."""
    return BatchFailed(BatchProblem(code=code, message=text))


class BatchErrors(msgspec.Struct):
    data: list[BatchProblem]
    object: Literal["list"] = "list"


class Counts(msgspec.Struct):
    """Lines of a batch: all, those answered with status 200, and those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(msgspec.Struct):
    cached_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all lines with an answer."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = msgspec.field(default_factory=InputDetails)
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch. The ids of its result files are there once it has ended, if they have a line. Times: Unix seconds."""

    id: str
    endpoint: Endpoint
    errors: BatchErrors | None = None
    input_file_id: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts
    metadata: dict[str, str] | None = None
    usage: BatchUsage
    model: str | UnsetType = UNSET
    completion_window: Literal["24h"] = "24h"
    object: Literal["batch"] = "batch"


class BatchRecord(Batch, kw_only=True, forbid_unknown_fields=True):
    """A `Batch` as it is stored. `tenant`: the API key's name. `ending`: how it ends, known once no line runs any more.

    output_id, error_id: ids that its two result files will have. results_expire_s: their lifetime.
    """

    tenant: str
    output_id: str
    error_id: str
    results_expire_s: int
    ending: Ending | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the batch is left to do."""
        return self.status in ENDED


def shown(record: msgspec.Struct, kind: type[T]) -> T:
    """Returns what a client sees of a record: its fields of a base class."""
    return kind(**{name: getattr(record, name) for name in kind.__struct_fields__})


def new_id(prefix: str) -> str:
    """Returns an id that nobody can guess, such as `file-5f0c…`."""
    return prefix + secrets.token_hex(16)
