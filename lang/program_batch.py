"""`ProgramBatch`: one batch of a program, and how its items run: in threads, on an event loop, or on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plait.lang.backends.cluster import Cluster
from plait.lang.display.texts import states_html
from plait.lang.execution.event_loop import require_no_running_loop, run_all_async
from plait.lang.execution.execution import Execution
from plait.lang.execution.threads import iter_in_order, num_workers
from plait.lang.html.render import ShownList

if TYPE_CHECKING:
    from plait.lang.backends.default_backend import Backend
    from plait.lang.batches.item_log import ItemLog
    from plait.lang.budget import Budget
    from plait.lang.program import Program
    from plait.lang.sampling_options import Options
    from plait.lang.states.state import ProgramState
    from plait.runtime.programs.backend import BackendClient


@dataclass(frozen=True)
class ProgramBatch:
    """`items`: index, which is part of the seed of an item -> its arguments. `options`: made from `sampling`.

    budget: of each item. log: keeps the items. target: the file that the program was loaded from, if it was not
    imported, and its name there.
    """

    program: Program[Any]
    items: Mapping[int, Mapping[str, Any]]
    sampling: Mapping[str, Any]
    options: Options
    budget: Budget | None = None
    num_threads: int | Literal["auto"] = "auto"
    log: ItemLog | None = None
    target: tuple[Path, str] | None = None

    def executions(self, client: BackendClient, indices: Collection[int]) -> list[Execution]:
        """Returns the runs of these items, each of which is kept in the log when it ends."""
        program, executions = self.program, list[Execution]()
        for index in indices:
            item = self.items[index]
            executions.append(
                Execution(program.name, program._body, (), item, client, self.options, self.budget, index)
            )
            if self.log is not None:
                executions[-1].on_done = partial(self.log.record, index)
        return executions

    def iter_states(self, backend: Backend | Cluster | None, progress_bar: bool) -> Iterator[ProgramState]:
        """Runs the items. Yields their states in order. Closing the iterator aborts the other items."""
        if isinstance(backend, Cluster):
            from plait.lang.cluster.batch import iter_on_cluster_in_order

            return iter_on_cluster_in_order(self, backend, progress_bar)
        executions = self.executions(self.program._client("run_batch", backend, self.options), self.items)
        return iter_in_order(executions, num_workers(self.num_threads, len(executions)), progress_bar)

    def run(self, backend: Backend | Cluster | None, progress_bar: bool) -> list[ProgramState]:
        """Runs the items that are not in the log. Returns the states of all, in order."""
        if isinstance(backend, Cluster):
            return ShownList(states_html, self.iter_states(backend, progress_bar))
        client = self.program._client("run_batch", backend, self.options)
        states = {} if self.log is None else dict(self.log.begin(client))
        left = [index for index in self.items if index not in states]
        states |= zip(left, self.run_here(self.executions(client, left), progress_bar), strict=True)
        return ShownList(states_html, (states[index] for index in self.items))

    def run_here(self, executions: Sequence[Execution], progress_bar: bool) -> list[ProgramState]:
        """Runs items, for a caller without an event loop. Returns their states in order."""
        workers = num_workers(self.num_threads, len(executions))
        if executions and executions[0].is_async:
            require_no_running_loop()
            concurrency = None if self.num_threads == "auto" else workers
            return asyncio.run(run_all_async(executions, concurrency, progress_bar))
        with contextlib.closing(iter_in_order(executions, workers, progress_bar)) as states:
            return list(states)
