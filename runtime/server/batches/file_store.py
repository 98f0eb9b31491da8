"""The stored files of all keys: who owns them, how much each key stores, and when they expire."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from plait.runtime.results.result_file import sync_folder
from plait.runtime.server.batches.directory import (
    StateDirectory,
    encode_record,
    open_new,
    read_records,
    remove,
    write_record,
)
from plait.runtime.server.batches.records import FileRecord, Purpose, new_id
from plait.runtime.server.errors import NOT_FOUND, ApiError
from plait.runtime.server.settings import ServerSettings

QUOTA = "storage_quota_exceeded"


class QuotaExceeded(Exception):
    """A key would store more than it may."""


class FileStore:
    """The files in a `StateDirectory`. settings: what one key may store.

    Methods that write are for threads; the event loop may call all others.
    """

    def __init__(self, directory: StateDirectory, settings: ServerSettings) -> None:
        self._folder, self.settings = directory.files, settings
        self._lock = threading.Lock()  # of the two mappings, which threads change while the event loop reads them
        self._files = {record.id: record for record in read_records(directory.files, FileRecord)}
        self._num_bytes: Counter[str] = Counter()  # by key, with uploads and results that are still written
        self._num_files: Counter[str] = Counter()  # likewise
        for record in self._files.values():
            self._count(record.tenant, record.bytes, 1)
        self.user_of: Callable[[str], str | None] = lambda file_id: None  # -> the id of a batch that reads the file

    # -- reading ----------------------------------------------------------------------------------

    def get(self, tenant: str, file_id: str, param: str | None = None) -> FileRecord:
        """Returns a file of this key. Raises ApiError 404 for one that does not exist, or is another key's."""
        record = self._files.get(file_id)
        if record is None or record.tenant != tenant or self._is_expired(record):
            text = f"there is no file {file_id[:100]!r}"
            raise ApiError(404, text, type=NOT_FOUND, param=param, code="file_not_found")
        return record

    def of_tenant(self, tenant: str) -> list[FileRecord]:
        """Returns the files of this key, the oldest first."""
        own = (record for record in self._all() if record.tenant == tenant and not self._is_expired(record))
        return sorted(own, key=lambda record: (record.created_at, record.id))

    def expired(self) -> list[FileRecord]:
        """Returns the files whose time is over, except for inputs of batches that have not ended."""
        return [record for record in self._all() if self._is_expired(record)]

    def _all(self) -> list[FileRecord]:
        with self._lock:
            return list(self._files.values())

    def content_path(self, file_id: str) -> Path:
        """Where the bytes of a file are; `file_id` is that of a record, never a client's text."""
        return self._folder / f"{file_id}.content"

    def _record_path(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def has(self, file_id: str) -> bool:
        """Whether a file with this id is stored."""
        return file_id in self._files

    # -- quotas -----------------------------------------------------------------------------------

    def reserve(self, tenant: str, num_bytes: int = 0, num_files: int = 0) -> None:
        """Counts what is about to be written. Raises QuotaExceeded, having counted nothing. Negative: takes back."""
        with self._lock:
            max_bytes, max_files = self.settings.max_stored_bytes_per_key, self.settings.max_files_per_key
            if num_bytes > 0 and self._num_bytes[tenant] + num_bytes > max_bytes:
                text = f"the stored files of this key may have {max_bytes} bytes in all, results included"
                raise QuotaExceeded(f"{text}; delete some, or ask the server's operator for more")
            if num_files > 0 and self._num_files[tenant] + num_files > max_files:
                text = f"this key may store {max_files} files, those of batches that run included"
                raise QuotaExceeded(f"{text}; delete some")
            self._count(tenant, num_bytes, num_files)

    def _count(self, tenant: str, num_bytes: int, num_files: int) -> None:
        self._num_bytes[tenant] += num_bytes
        self._num_files[tenant] += num_files

    def expect(self, tenant: str, file_id: str) -> None:
        """Counts, at the start, a file of results that a batch will add, with the bytes that it has so far."""
        path = self.content_path(file_id)
        if not self.has(file_id):
            self._count(tenant, path.stat().st_size if path.exists() else 0, 1)

    # -- writing ----------------------------------------------------------------------------------

    def remove_leftovers(self, expected: Collection[str]) -> None:
        """Removes what a killed server left: uploads that had not ended, and records that were not complete.

        `expected`: ids of the results of batches.
        """
        for path in self._folder.iterdir():
            is_content = path.suffix == ".content" and (self.has(path.stem) or path.stem in expected)
            if path.suffix != ".json" and not is_content:
                remove(path)

    @contextlib.contextmanager
    def new_upload(self) -> Iterator[tuple[str, int]]:
        """Yields the id and the descriptor of a new file; closes it, and removes it unless it was added."""
        file_id = new_id("file-")
        descriptor = open_new(self.content_path(file_id))
        try:
            yield file_id, descriptor
        finally:
            os.close(descriptor)
            self.remove_unused(file_id)

    def add(self, file_id: str, tenant: str, purpose: Purpose, filename: str, lifetime_s: int) -> FileRecord:
        """Makes bytes on disk a file, durably, if that has not been done. It and its bytes have been reserved."""
        if self.has(file_id):
            return self._files[file_id]
        now = int(time.time())
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            purpose=purpose,
            filename=filename,
            bytes=self.content_path(file_id).stat().st_size,
            created_at=now,
            expires_at=now + lifetime_s,
        )
        write_record(self._record_path(file_id), encode_record(record))
        self._show(record)
        return record

    def remove_unused(self, file_id: str) -> None:
        """Removes bytes that did not become a file. Raises OSError."""
        if not self._record_path(file_id).exists():
            remove(self.content_path(file_id))

    def _show(self, record: FileRecord) -> None:
        with self._lock:
            self._files[record.id] = record

    def hide(self, record: FileRecord) -> None:
        """Makes a file unknown, in the event loop, so that nothing begins to use it while `delete` removes it."""
        with self._lock:
            del self._files[record.id]

    def delete(self, record: FileRecord) -> None:
        """Removes a hidden file: first its record, so that no record is ever without its bytes.

        Raises OSError; the file is known again if its record is still there.
        """
        try:
            remove(self._record_path(record.id))
        except OSError:
            self._show(record)
            raise
        self.reserve(record.tenant, -record.bytes, -1)
        sync_folder(self._folder)
        remove(self.content_path(record.id))

    def _is_expired(self, record: FileRecord) -> bool:
        return record.expires_at <= time.time() and self.user_of(record.id) is None
