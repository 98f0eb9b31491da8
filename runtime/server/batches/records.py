"""What is stored about each file and each batch, and their ids."""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["failed", "completed", "expired", "cancelled"]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
DAY_S = 86_400


class FileRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A stored file. Times are Unix seconds. `filename` is the client's, a label only; `tenant`: the API key's name."""

    id: str
    tenant: str
    purpose: Purpose
    filename: str
    bytes: int
    created_at: int
    expires_at: int


class BatchProblem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Why a batch failed. `line`: of its input, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, forbid_unknown_fields=True):
    """Lines of a batch: all, those answered with status 200, and those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class TokenCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens of all answered lines."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


class BatchRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A batch. `ending`: how it ends, known from the start of finalizing.

    output_id, error_id: ids that its two result files will have. results_expire_s: their lifetime. is_sealed: the
    results are complete. has_output, has_errors: which of the two files there are, known at the end.
    """

    id: str
    tenant: str
    endpoint: Endpoint
    input_file_id: str
    output_id: str
    error_id: str
    results_expire_s: int
    created_at: int
    expires_at: int
    status: Status = "validating"
    ending: Ending | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    problems: list[BatchProblem] = []
    counts: Counts = msgspec.field(default_factory=Counts)
    tokens: TokenCounts = msgspec.field(default_factory=TokenCounts)
    is_sealed: bool = False
    has_output: bool = False
    has_errors: bool = False
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the batch is left to do."""
        return self.status in ENDED


def new_id(prefix: str) -> str:
    """Returns an id that nobody can guess, such as `file-5f0c…`."""
    return prefix + secrets.token_hex(16)
