"""Errors of the disk, and exceeded quotas, as responses."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from plait.runtime.server.batches.directory import disk_problem
from plait.runtime.server.batches.file_store import QUOTA, QuotaExceeded
from plait.runtime.server.errors import INTERNAL, ApiError

log = logging.getLogger("plait.server")


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
