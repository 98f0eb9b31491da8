"""Runs one batch from its present state to its end, and keeps that state on disk.

    validating -> in_progress -> finalizing -> completed or expired
    validating or in_progress -> cancelling -> cancelled
    validating -> failed (problems of the input);  any -> failed (a full disk, the key's quota, damaged results)

After a kill the same steps are taken again: lines that have a result are skipped, files that were moved stay moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
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
    write_record,
)
from plait.runtime.server.batches.file_store import QUOTA, FileStore, QuotaExceeded
from plait.runtime.server.batches.input_file import (
    CheckedInput,
    InputChanged,
    Line,
    check_input,
    read_line,
    read_lines,
    write_lines,
)
from plait.runtime.server.batches.line_runner import LineRunner
from plait.runtime.server.batches.records import BatchProblem, BatchRecord, Ending, new_id
from plait.runtime.server.batches.result_log import DamagedResults, ResultLine, ResultLog
from plait.runtime.server.batches.result_writer import ResultWriter
from plait.runtime.server.batches.slots import Slot, Slots
from plait.runtime.server.settings import ServerSettings

NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}
LINES_AT_ONCE = 1000  # that get the error "not run"
NUM_RESULT_FILES = 2  # that a batch may have
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # before the end of a batch is stored again, when the disk refused it

log = logging.getLogger("plait.server")


class BatchRun:
    """One batch of a server. `record` is its state; `run()` leads it to its end."""

    def __init__(
        self,
        record: BatchRecord,
        directory: StateDirectory,
        files: FileStore,
        settings: ServerSettings,
        slots: Slots,
        checks: Slots,
        turn: asyncio.Lock,
        lines: LineRunner,
    ) -> None:
        self.record = record
        self._folder, self._files, self._settings = directory.batches, files, settings
        self._index = directory.batches / f"{record.id}{INDEX_SUFFIX}"
        self._slots, self._checks, self._turn, self._lines = slots, checks, turn, lines
        self._stop = asyncio.Event()
        self._saving = asyncio.Lock()
        if record.status == "cancelling":
            self._stop.set()

    # -- state ------------------------------------------------------------------------------------

    async def save(self, **changes: Any) -> None:
        """Changes the record, first on disk: nobody sees a state that a crash takes back. Raises OSError."""
        async with self._saving:
            await self._save(changes)

    async def _save(self, changes: dict[str, Any]) -> None:
        encoded = encode_record(msgspec.structs.replace(self.record, **changes))
        await asyncio.to_thread(write_record, self._folder / f"{self.record.id}.json", encoded)
        for name, value in changes.items():
            setattr(self.record, name, value)

    async def cancel(self) -> bool:
        """Ends the batch: lines that run are stopped. Returns False if it ends already.

        Raises OSError if it cannot be stored.
        """
        if self.record.status == "cancelling":
            return True
        async with self._saving:
            if self.record.status in ("validating", "in_progress"):
                await self._save({"status": "cancelling", "cancelling_at": int(time.time())})
                self._stop.set()
            return self._stop.is_set()

    async def run(self) -> None:
        """Leads the batch to its end. Raises nothing: what goes wrong is the reason of its status `failed`."""
        try:
            await self._run()
        except QuotaExceeded as error:
            await self._fail(QUOTA, str(error))
        except DamagedResults as error:
            await self._fail("damaged_results", f"{error}; the batch cannot be continued")
        except InputChanged as error:
            await self._fail("input_changed", f"the input has changed since it was checked: {error}")
        except OSError as error:
            await self._fail(*disk_problem(error))
        except Exception:
            log.exception("batch %s failed", self.record.id)
            await self._fail("server_error", "the server failed on this batch; see its log")

    async def _run(self) -> None:
        record = self.record
        if not record.is_sealed:
            results = await asyncio.to_thread(self._open_results)
            if not await self._check():
                return
            has_turn = await self._wait_for_turn()
            try:
                await self._run_lines(await asyncio.to_thread(read_lines, self._index), results)
            finally:
                if has_turn:
                    self._turn.release()
        assert record.ending is not None
        await self._end(record.ending)

    async def _check(self) -> bool:
        """Checks the input, unless that was done. Returns False if the batch has ended before or by that."""
        record = self.record
        if record.in_progress_at is not None and self._index.exists():
            return True
        checking = asyncio.create_task(self._check_input())
        ending = await self._unless_stopped(checking)
        if ending is not None:
            await self._end(ending)
            return False
        checked = checking.result()
        if checked.problems:
            if record.in_progress_at is not None:  # it was right when the batch began
                raise InputChanged(checked.problems[0].message)
            await self._end("failed", checked.problems)
            return False
        record.counts.total = len(checked.lines)
        async with self._saving:
            await asyncio.to_thread(write_lines, self._index, checked.lines)
            if record.status == "validating":
                await self._save({"status": "in_progress", "in_progress_at": int(time.time())})
        return True

    async def _check_input(self) -> CheckedInput:
        record, settings = self.record, self._settings
        slot = await self._checks.acquire(record.tenant)
        try:
            slot.set_calls(1)
            path = self._files.content_path(record.input_file_id)
            return await check_input(path, record.endpoint, settings.max_body_bytes, settings.max_batch_lines)
        finally:
            slot.release()

    async def _wait_for_turn(self) -> bool:
        """Waits for all earlier batches of the key. Returns False if the batch is cancelled or expires before."""
        if self.record.ending is not None:
            return False
        self.record.ending = await self._unless_stopped(asyncio.create_task(self._turn.acquire()))
        return self.record.ending is None

    def _open_results(self) -> ResultLog:
        record = self.record
        output, errors = (self._folder / f"{record.id}.{name}" for name in ("output", "errors"))
        results = ResultLog(output, errors, lambda num_bytes: self._files.reserve(record.tenant, num_bytes))
        results.counts.total = record.counts.total
        record.counts, record.tokens = results.counts, results.tokens
        return results

    async def _run_lines(self, lines: list[Line], results: ResultLog) -> None:
        record, writer = self.record, ResultWriter(results)
        record.counts.total = len(lines)
        lines = [line for line in lines if line.id_digest not in results.done]
        if record.ending is None:
            record.ending = await self._execute(lines, writer)
        if record.status != "finalizing":
            await self._start_finalizing()
        if record.ending in NOT_RUN:
            await self._add_lines_not_run(lines, results, NOT_RUN[record.ending])
        await self.save(is_sealed=True)

    async def _start_finalizing(self) -> None:
        """A cancelled batch stays cancelling, as with OpenAI, so that it can be cancelled a second time."""
        is_cancelled = self.record.ending == "cancelled"
        await self.save(**({} if is_cancelled else {"status": "finalizing", "finalizing_at": int(time.time())}))

    # -- lines ------------------------------------------------------------------------------------

    async def _execute(self, lines: list[Line], writer: ResultWriter) -> Ending:
        """Runs lines until all have a result, the batch is cancelled, or its time is over. Returns how it ended."""
        try:
            return await self._unless_stopped(asyncio.create_task(self._run_all(lines, writer))) or "completed"
        finally:
            await writer.flush()

    async def _unless_stopped(self, work: asyncio.Task[Any]) -> Ending | None:
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

    async def _run_all(self, lines: list[Line], writer: ResultWriter) -> None:
        """Runs the lines. Raises what the first failure raises."""
        tasks: dict[asyncio.Task[None], Slot] = {}
        try:
            for line in lines:
                for slot in tasks.values():
                    await slot.wait_while_parked()
                slot = await self._slots.acquire(self.record.tenant)
                task = asyncio.create_task(self._lines.run(self.record, line, slot, writer))
                task.add_done_callback(partial(_release, slot))  # also of a task that is cancelled before it begins
                tasks[task] = slot
                for ended in [task for task in tasks if task.done()]:
                    del tasks[ended]
                    ended.result()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _add_lines_not_run(self, lines: list[Line], results: ResultLog, error: tuple[str, str]) -> None:
        """Gives every line without a result its error."""
        path = self._files.content_path(self.record.input_file_id)
        missing = [line for line in lines if line.id_digest not in results.done]
        for start in range(0, len(missing), LINES_AT_ONCE):
            part = missing[start : start + LINES_AT_ONCE]
            await asyncio.to_thread(partial(_append_not_run, results, path, part, error))

    # -- the end ----------------------------------------------------------------------------------

    async def _end(self, ending: Ending, problems: list[BatchProblem] | None = None, has_results: bool = True) -> None:
        """Ends the batch, with what is stored of its results as files of the key.

        Tries until that is on disk: a batch that has ended does not run again after a restart.
        """
        record, pause_s = self.record, FIRST_PAUSE_S
        changes = {"status": ending, "ending": ending, "problems": problems or [], f"{ending}_at": int(time.time())}
        while True:
            try:
                if has_results:
                    await asyncio.to_thread(self._add_results)
                await self.save(**changes)
                break
            except OSError as error:
                log.error("the end of batch %s cannot be stored, and is tried again: %s", record.id, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        with contextlib.suppress(OSError):  # the next start removes it
            await asyncio.to_thread(remove, self._index)
        self._files.release(record.tenant, num_files=NUM_RESULT_FILES - record.has_output - record.has_errors)

    def _add_results(self) -> None:
        """Makes files of the results. Those that were moved or added before a crash are left as they are."""
        record = self.record
        for name, file_id in (("output", record.output_id), ("errors", record.error_id)):
            path, filename = self._folder / f"{record.id}.{name}", f"{record.id}_{name}.jsonl"
            is_there = _is_filled(path) or _is_filled(self._files.content_path(file_id))
            setattr(record, f"has_{name}", is_there)
            if is_there:
                self._files.add_results(path, file_id, record.tenant, filename, record.results_expire_s)

    async def _fail(self, code: str, text: str) -> None:
        """Ends the batch with an error of the server."""
        log.error("batch %s failed: %s", self.record.id, text)
        await self._end("failed", [BatchProblem(code=code, message=text)], has_results=code != "damaged_results")


def _is_filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _release(slot: Slot, task: asyncio.Task[None]) -> None:
    slot.release()


def _append_not_run(results: ResultLog, path: Path, lines: list[Line], error: tuple[str, str]) -> None:
    code, text = error
    ids = [read_line(path, line).custom_id for line in lines]
    results.append([ResultLine(new_id("batch_req_"), name, None, {"code": code, "message": text}) for name in ids])
