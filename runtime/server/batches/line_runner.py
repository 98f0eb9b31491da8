"""Runs the lines of batches: asks the endpoint, repeats what failed for no fault of the line, stores the answer.

A server that shuts down leaves a line without a result; the next server on the same directory runs it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from plait.runtime.server.batches.file_store import FileStore
from plait.runtime.server.batches.input_file import Line, read_line
from plait.runtime.server.batches.line_request import LineAnswer, SetCalls
from plait.runtime.server.batches.records import BatchRecord, new_id
from plait.runtime.server.batches.result_log import ResultLine, ResultLog
from plait.runtime.server.batches.slots import Slot, Slots

MAX_RUNS = 5  # of a line that is refused for lack of capacity or fails with the server
MAX_RUNS_WITH_LOST_RUNTIME = 2  # it may be the cause; the second run was alone
FIRST_PAUSE_S = 1.0  # before the next run; it doubles
REPEATED = frozenset({429, 503})
RUNTIME_GONE = "runtime_gone"

Ask = Callable[[str, bytes, str, str, SetCalls], Awaitable[LineAnswer]]
"""(path, body, tenant, label, set_calls) -> the response."""


class LineRunner:
    """Runs the lines of all batches of a server in `slots`. is_draining(): whether the server shuts down."""

    def __init__(self, files: FileStore, slots: Slots, ask: Ask, is_draining: Callable[[], bool]) -> None:
        self._files, self.slots, self._ask, self._is_draining = files, slots, ask, is_draining
        self._alone = asyncio.Lock()  # held by a line that may have ended a runtime

    async def run(self, record: BatchRecord, lines: Sequence[Line], results: ResultLog) -> None:
        """Gives each line its result. Raises what the first failure raises: OSError, QuotaExceeded, BatchFailed."""
        tasks: dict[asyncio.Task[None], Slot] = {}
        try:
            for line in lines:
                for slot in tasks.values():
                    await slot.wait_for_model()
                slot = await self.slots.acquire(record.tenant)
                task = asyncio.create_task(self._run_line(record, line, slot, results))
                task.add_done_callback(slot.release)  # also of a task that is cancelled before it begins
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
            await results.flush()

    async def _run_line(self, record: BatchRecord, line: Line, slot: Slot, results: ResultLog) -> None:
        request = await asyncio.to_thread(read_line, self._files.content_path(record.input_file_id), line)
        answer = await self._answer(record, bytes(request.body), f"{record.id}:{line.number}", slot)
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
        await results.put(ResultLine(new_id("batch_req_"), request.custom_id, response, None))

    async def _answer(self, record: BatchRecord, body: bytes, label: str, slot: Slot) -> LineAnswer:
        """The response to a line, from the first run that may count."""
        pause_s, num_lost = FIRST_PAUSE_S, 0
        for run in range(1, MAX_RUNS + 1):
            await self._stop_if_draining()
            async with self._alone if num_lost else contextlib.nullcontext():
                answer = await self._ask(record.endpoint, body, record.tenant, label, slot.set_calls)
            if answer.status not in REPEATED:
                break
            await self._stop_if_draining()
            num_lost += _error_code(answer) == RUNTIME_GONE
            if run == MAX_RUNS or num_lost == MAX_RUNS_WITH_LOST_RUNTIME:
                break
            slot.set_calls(1)  # it no longer waits for its model, if it did
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return answer

    async def _stop_if_draining(self) -> None:
        """Does not return if the server shuts down: the line is then cancelled."""
        if self._is_draining():
            await asyncio.get_running_loop().create_future()


def _error_code(answer: LineAnswer) -> Any:
    try:
        return json.loads(answer.body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
