"""All batches of one server: creates, lists and cancels them, and runs those that have not ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import UNSET

from plait.runtime.server.batches.batch_run import NUM_RESULT_FILES, BatchRun, Turns
from plait.runtime.server.batches.directory import (
    INDEX_SUFFIX,
    StateDirectory,
    read_records,
    remove,
    remove_unfinished,
)
from plait.runtime.server.batches.file_store import FileStore
from plait.runtime.server.batches.line_runner import Ask, LineRunner
from plait.runtime.server.batches.records import DAY_S, BatchRecord, BatchUsage, Counts, Endpoint, new_id
from plait.runtime.server.batches.slots import Slots
from plait.runtime.server.errors import NOT_FOUND, ApiError, invalid
from plait.runtime.server.settings import ServerSettings

COMPLETION_WINDOW_S = DAY_S
KEPT_S = 30 * DAY_S  # a batch after it was created
KEPT_PER_KEY = 1000  # batches that have ended
MAX_UNFINISHED_PER_KEY = 64
HOUSEKEEPING_S = 60.0
MAX_CHECKS = 4  # inputs at a time, each of which takes memory for its lines; of one key one, as its batches run in turn
RATE_LIMIT_ERROR = "rate_limit_error"

log = logging.getLogger("plait.server")


class BatchService:
    """The files and batches of one server, in `directory`. Raises InputError for damaged state.

    ask: answers a line. may_start(): whether another line may be begun now. is_draining(): the server shuts down.
    """

    def __init__(
        self,
        directory: StateDirectory,
        settings: ServerSettings,
        ask: Ask,
        may_start: Callable[[], bool],
        is_draining: Callable[[], bool],
    ) -> None:
        self._directory, self._settings = directory, settings
        self.files = FileStore(directory, settings)
        self.files.user_of = self._user_of
        self._records = {record.id: record for record in read_records(directory.batches, BatchRecord)}
        for record in self._unfinished():
            self.files.expect(record.tenant, record.output_id)
            self.files.expect(record.tenant, record.error_id)
        self._slots = Slots(
            settings.max_batch_calls or settings.max_running,
            lambda: may_start() and not is_draining(),
            settings.key_weights,
        )
        self._checks = asyncio.Semaphore(MAX_CHECKS)
        self._lines = LineRunner(self.files, self._slots, ask, is_draining)
        self._turns: defaultdict[str, Turns] = defaultdict(Turns)
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._housekeeping: asyncio.Task[None] | None = None

    # -- running ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Continues the batches that have not ended, in the running event loop. Idempotent.

        The batches of a key that the server no longer has are left as they are.
        """
        if self._housekeeping is not None and not self._housekeeping.done():
            return
        unfinished = sorted(self._unfinished(), key=lambda record: (record.created_at, record.id))
        results = {file_id for record in self._records.values() for file_id in (record.output_id, record.error_id)}
        self.files.remove_leftovers(expected=results)
        remove_unfinished(self._directory.batches, running={record.id for record in unfinished})
        self._housekeeping = asyncio.create_task(self._keep_house())
        for record in unfinished:
            if record.tenant in (self._settings.api_keys or ("",)):
                log.info("batch %s is continued: %s", record.id, record.status)
                self._start(self._new_run(record))
            else:
                log.warning("batch %s is not continued: there is no API key named %r", record.id, record.tenant)

    async def stop(self) -> None:
        """Stops all batches where they are, and unlocks the directory. They are continued by the next server."""
        tasks = [*self._tasks, *([self._housekeeping] if self._housekeeping is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._directory.close()

    def _new_run(self, record: BatchRecord) -> BatchRun:
        turns = self._turns[record.tenant]
        return BatchRun(record, self._directory, self.files, turns, self._checks, self._lines)

    def _start(self, run: BatchRun) -> None:
        self._runs[run.record.id] = run
        task = asyncio.create_task(run.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: self._runs.pop(run.record.id))

    async def _keep_house(self) -> None:
        """Removes what has expired, now and every minute."""
        while True:
            await self._remove_expired()
            await asyncio.sleep(HOUSEKEEPING_S)

    async def _remove_expired(self) -> None:
        """Raises nothing: what cannot be removed now is tried again."""
        for file in self.files.expired():
            if self.files.has(file.id):
                self.files.hide(file)
                await self._remove("file", file.id, partial(self.files.delete, file))
        oldest = time.time() - KEPT_S
        for record in list(self._records.values()):
            if record.id not in self._runs and record.created_at <= oldest:
                await self._remove("batch", record.id, partial(self._remove_files, self._records.pop(record.id)))

    async def _remove(self, kind: str, name: str, remove: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(remove)
        except OSError as error:
            log.error("the %s %s, which has expired, cannot be removed: %s", kind, name, error)

    def _remove_files(self, *records: BatchRecord) -> None:
        """Removes all of batches that are forgotten, in a thread. Raises OSError."""
        for record in records:
            for file_id in (record.output_id, record.error_id):
                self.files.remove_unused(file_id)
            for suffix in (INDEX_SUFFIX, ".json"):
                remove(self._directory.batches / f"{record.id}{suffix}")

    # -- requests of clients ----------------------------------------------------------------------

    async def create(
        self, tenant: str, input_file_id: str, endpoint: Endpoint, metadata: dict[str, str] | None, model: str | None,
        results_expire_s: int,
    ) -> BatchRecord:  # fmt: skip
        """Creates a batch and starts it. Raises ApiError, QuotaExceeded, and OSError if it cannot be stored."""
        source = self.files.get(tenant, input_file_id, "input_file_id")
        if source.purpose != "batch":
            raise invalid(f"the purpose of 'input_file_id' must be batch, not {source.purpose}", "input_file_id")
        num_unfinished = sum(record.tenant == tenant for record in self._unfinished())
        if num_unfinished >= MAX_UNFINISHED_PER_KEY:
            text = f"this key has {MAX_UNFINISHED_PER_KEY} batches that have not ended; try again when one has"
            raise ApiError(429, text, type=RATE_LIMIT_ERROR, code="rate_limit_exceeded")
        self.files.reserve(tenant, num_files=NUM_RESULT_FILES)
        now = int(time.time())
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=source.id,
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            results_expire_s=results_expire_s,
            created_at=now,
            expires_at=now + COMPLETION_WINDOW_S,
            status="validating",
            request_counts=Counts(),
            usage=BatchUsage(),
            metadata=metadata,
            model=model or UNSET,
        )
        run = self._new_run(record)
        self._records[record.id] = record  # before the first wait, so that its input is not deleted meanwhile
        try:
            ended = [other for other in self.of_tenant(tenant) if other.has_ended]
            surplus = [self._records.pop(other.id) for other in ended[KEPT_PER_KEY - 1 :]]
            await asyncio.to_thread(self._remove_files, *surplus)
            await run.save()
        except BaseException:
            del self._records[record.id]
            self.files.reserve(tenant, num_files=-NUM_RESULT_FILES)
            raise
        self._start(run)
        return record

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Returns a batch of this key. Raises ApiError 404 for one that does not exist, or is another key's."""
        record = self._records.get(batch_id)
        if record is None or record.tenant != tenant:
            text = f"there is no batch {batch_id[:100]!r}"
            raise ApiError(404, text, type=NOT_FOUND, code="batch_not_found")
        return record

    def of_tenant(self, tenant: str) -> list[BatchRecord]:
        """Returns the batches of this key, the newest first."""
        own = (record for record in self._records.values() if record.tenant == tenant)
        return sorted(own, key=lambda record: (record.created_at, record.id), reverse=True)

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Starts to cancel a batch. Raises ApiError 409 for one that ends or has ended, and OSError."""
        record = self.get(tenant, batch_id)
        run = self._runs.get(batch_id)
        if run is None or not await run.cancel():
            text = f"a batch with the status {record.status} cannot be cancelled"
            raise ApiError(409, text, code="invalid_status")
        return record

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises ApiError 404, and 409 for the input or results of a batch that has not ended."""
        record = self.files.get(tenant, file_id)
        if (batch_id := self._user_of(file_id)) is not None:
            text = f"the file is used by {batch_id}, which has not ended; cancel the batch first"
            raise ApiError(409, text, code="file_in_use")
        self.files.hide(record)
        await asyncio.to_thread(self.files.delete, record)

    def _unfinished(self) -> list[BatchRecord]:
        return [record for record in self._records.values() if not record.has_ended]

    def _user_of(self, file_id: str) -> str | None:
        """The id of a batch that reads or writes this file."""
        for record in self._unfinished():
            if file_id in (record.input_file_id, record.output_id, record.error_id):
                return record.id
        return None
