"""Appends the results of one batch in a thread. Results that come while it writes are written together."""

from __future__ import annotations

import asyncio

from plait.runtime.server.batches.result_log import ResultLine, ResultLog


class ResultWriter:
    """`await put(line)` returns once the line is on disk. Its lines are written in the order in which they came."""

    def __init__(self, results: ResultLog) -> None:
        self._results = results
        self._pending: list[tuple[ResultLine, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, line: ResultLine) -> None:
        """Stores a line. It is stored even if the caller is cancelled. Raises what `ResultLog.append` raises."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((line, stored))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        await asyncio.shield(stored)

    async def flush(self) -> None:
        """Waits until all lines are written."""
        while self._task is not None and not self._task.done():
            await asyncio.shield(self._task)

    async def _write(self) -> None:
        while self._pending:
            pending, self._pending = self._pending, []
            try:
                await asyncio.to_thread(self._results.append, [line for line, _ in pending])
            except Exception as error:
                for _, stored in pending:
                    stored.set_exception(error)
                    stored.exception()  # retrieved, also where nobody waits for it any more
            else:
                for _, stored in pending:
                    stored.set_result(None)
