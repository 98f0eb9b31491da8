"""Runs one batch from its present state to its end, and keeps that state on disk.

    validating -> in_progress -> finalizing -> completed or expired
    validating or in_progress -> cancelling -> cancelled
    validating -> failed (problems of the input);  any -> failed (a full disk, the key's quota, damaged results)

After a kill the same steps are taken again: lines that have a result are skipped, files that were added stay added.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from plait.runtime.server.batches.directory import (
    INDEX_SUFFIX,
    StateDirectory,
    disk_problem,
    encode_record,
    remove,
    run_to_end,
    write_record,
)
from plait.runtime.server.batches.file_store import QUOTA, FileStore, QuotaExceeded
from plait.runtime.server.batches.input_file import Line, changed, check_input, read_line, read_lines, write_lines
from plait.runtime.server.batches.line_runner import LineRunner
from plait.runtime.server.batches.records import (
    BatchErrors,
    BatchFailed,
    BatchProblem,
    BatchRecord,
    Ending,
    failure,
    new_id,
)
from plait.runtime.server.batches.result_log import ResultLine, ResultLog

NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}
LINES_AT_ONCE = 1000  # that get the error "not run"
NUM_RESULT_FILES = 2  # that a batch may have
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # before the end of a batch is stored again, when the disk refused it

log = logging.getLogger("plait.server")


@dataclass
class Turns:
    """Held by the batch of a key whose input is checked, and by the one whose lines run."""

    check: asyncio.Lock = field(default_factory=asyncio.Lock)
    lines: asyncio.Lock = field(default_factory=asyncio.Lock)


class BatchRun:
    """One batch of a server. `record` is its state; `run()` leads it to its end.

    turns: of its key's batches. checks: bounds those of inputs over all keys.
    """

    def __init__(
        self,
        record: BatchRecord,
        directory: StateDirectory,
        files: FileStore,
        turns: Turns,
        checks: asyncio.Semaphore,
        lines: LineRunner,
    ) -> None:
        self.record, self._files = record, files
        self._path = directory.batches / f"{record.id}.json"
        self._index = self._path.with_suffix(INDEX_SUFFIX)
        self._turns, self._checks, self._lines = turns, checks, lines
        self._stop = asyncio.Event()
        self._saving = asyncio.Lock()
        if record.status == "cancelling":
            self._stop.set()

    # -- state ------------------------------------------------------------------------------------

    async def save(self, was: Collection[str] | None = None, **changes: Any) -> bool:
        """Changes the record, first on disk: nobody sees a state that a crash takes back. Raises OSError.

        was: returns False, and changes nothing, if the status is another one.
        """
        async with self._saving:
            if was is not None and self.record.status not in was:
                return False
            encoded = encode_record(msgspec.structs.replace(self.record, **changes))
            await run_to_end(write_record, self._path, encoded)
            for name, value in changes.items():
                setattr(self.record, name, value)
            return True

    async def cancel(self) -> bool:
        """Ends the batch: lines that run are stopped. Returns False if it ends already.

        Raises OSError if it cannot be stored.
        """
        can_be, now = ("validating", "in_progress"), int(time.time())
        if not self._stop.is_set() and await self.save(can_be, status="cancelling", cancelling_at=now):
            self._stop.set()
        return self._stop.is_set()

    async def run(self) -> None:
        """Runs the batch to completion. Raises nothing: an error becomes the reason of its status `failed`."""
        try:
            await self._run()
            return
        except BatchFailed as error:
            failed = error
        except QuotaExceeded as error:
            failed = failure(QUOTA, str(error))
        except OSError as error:
            failed = failure(*disk_problem(error))
        except Exception:
            log.exception("batch %s failed", self.record.id)
            failed = failure("server_error", "the server failed on this batch; see its log")
        if self.record.in_progress_at is not None:
            log.error("batch %s failed: %s", self.record.id, failed)
        await self._end("failed", failed.problems)

    async def _run(self) -> None:
        record = self.record
        results = await asyncio.to_thread(self._open_results)
        if record.ending is None:
            ending = await self._unless_stopped(asyncio.create_task(self._run_lines(results))) or "completed"
            now = int(time.time())
            if not await self.save(("in_progress",), ending=ending, status="finalizing", finalizing_at=now):
                await self.save(ending=ending)  # cancelling, as with OpenAI, so that it can be cancelled a second time
        assert record.ending is not None
        if record.ending in NOT_RUN and self._index.exists():
            await self._add_lines_not_run(results, NOT_RUN[record.ending])
        await self._end(record.ending)

    def _open_results(self) -> ResultLog:
        record, files = self.record, self._files
        paths = files.content_path(record.output_id), files.content_path(record.error_id)
        results = ResultLog(*paths, partial(files.reserve, record.tenant))
        results.counts.total = record.request_counts.total
        record.request_counts, record.usage = results.counts, results.usage
        return results

    async def _unless_stopped(self, work: asyncio.Task[None]) -> Ending | None:
        """Waits until `work` is done. Returns how the batch ends if it is cancelled or its time is over before."""
        stopped = asyncio.create_task(self._stop.wait())
        try:
            timeout_s = max(0.0, self.record.expires_at - time.time())
            await asyncio.wait({work, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return None
            return "cancelled" if stopped.done() else "expired"
        finally:
            stopped.cancel()
            work.cancel()
            await asyncio.wait({work})  # its lines stop and store nothing more

    # -- lines ------------------------------------------------------------------------------------

    async def _run_lines(self, results: ResultLog) -> None:
        """Runs the lines that have no result, after all earlier batches of the key. Raises what a line raises."""
        record = self.record
        if record.in_progress_at is None or not self._index.exists():
            await self._check()
        async with self._turns.lines:
            lines = await asyncio.to_thread(read_lines, self._index)
            record.request_counts.total = len(lines)
            await self._lines.run(record, [line for line in lines if line.id_digest not in results.done], results)

    async def _check(self) -> None:
        """Checks the input, and writes its index. Raises BatchFailed and OSError."""
        record, settings = self.record, self._files.settings
        path = self._files.content_path(record.input_file_id)
        try:
            async with self._turns.check, self._checks:
                lines = await check_input(path, record.endpoint, settings.max_body_bytes, settings.max_batch_lines)
        except BatchFailed as error:
            if record.in_progress_at is None:
                raise
            raise changed(error.problems[0].message) from None  # it was right when the batch began
        record.request_counts.total = len(lines)
        await run_to_end(write_lines, self._index, lines)
        await self.save(("validating",), status="in_progress", in_progress_at=int(time.time()))

    async def _add_lines_not_run(self, results: ResultLog, error: tuple[str, str]) -> None:
        """Gives every line without a result its error."""
        path = self._files.content_path(self.record.input_file_id)
        lines = await asyncio.to_thread(read_lines, self._index)
        missing = [line for line in lines if line.id_digest not in results.done]
        self.record.request_counts.total = len(lines)
        for start in range(0, len(missing), LINES_AT_ONCE):
            part = missing[start : start + LINES_AT_ONCE]
            await asyncio.to_thread(_append_not_run, results, path, part, error)

    # -- the end ----------------------------------------------------------------------------------

    async def _end(self, ending: Ending, problems: Sequence[BatchProblem] = ()) -> None:
        """Ends the batch, with what is stored of its results as files of the key, unless they are damaged.

        Tries until that is on disk: a batch that has ended does not run again after a restart.
        """
        record, pause_s = self.record, FIRST_PAUSE_S
        has_results = not any(problem.code == "damaged_results" for problem in problems)
        changes: dict[str, Any] = {
            "status": ending,
            "ending": ending,
            "errors": BatchErrors(list(problems)) if problems else None,
            f"{ending}_at": int(time.time()),
        }
        while True:
            try:
                changes |= await asyncio.to_thread(self._add_results) if has_results else {}
                await self.save(**changes)
                break
            except OSError as error:
                log.error("the end of batch %s cannot be stored, and is tried again: %s", record.id, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        with contextlib.suppress(OSError):  # the next start removes it
            await asyncio.to_thread(remove, self._index)
        num_files = (record.output_file_id is not None) + (record.error_file_id is not None)
        self._files.reserve(record.tenant, num_files=num_files - NUM_RESULT_FILES)

    def _add_results(self) -> dict[str, str]:
        """Makes files of the results that have a line. Returns the fields of the record that name them."""
        record, found = self.record, dict[str, str]()
        for name, suffix, file_id in (("output", "output", record.output_id), ("error", "errors", record.error_id)):
            path = self._files.content_path(file_id)
            if path.exists() and path.stat().st_size:
                filename = f"{record.id}_{suffix}.jsonl"
                self._files.add(file_id, record.tenant, "batch_output", filename, record.results_expire_s)
                found[f"{name}_file_id"] = file_id
            else:
                self._files.remove_unused(file_id)
        return found


def _append_not_run(results: ResultLog, path: Path, lines: list[Line], error: tuple[str, str]) -> None:
    code, text = error
    ids = [read_line(path, line).custom_id for line in lines]
    results.append([ResultLine(new_id("batch_req_"), name, None, {"code": code, "message": text}) for name in ids])
