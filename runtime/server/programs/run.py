"""Runs a program's steps in one session and its forks. Nothing waits but what needs a value: a `var`, an "append".

Instructions go to the scheduler in program order without waiting for answers; each call is watched by a task of its
own. The first failure ends the whole program, and what still runs is aborted.

Knows: steps, strands, calls. Must not know: HTTP, JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.following import follow
from plait.runtime.client.session import Session
from plait.runtime.errors import PlaitError
from plait.runtime.sampling import SamplingParams
from plait.runtime.server.errors import ApiError, as_api_error
from plait.runtime.server.in_flight import current
from plait.runtime.server.programs.compile import (
    AddText,
    AddVariable,
    Branches,
    Choose,
    Generate,
    Step,
    Turn,
    gathered,
)
from plait.runtime.server.programs.strand import Piece, Strand, Value


@dataclass(frozen=True)
class Done:
    """A call that is over. `sample`: which of a gen's n."""

    step: Generate | Choose
    sample: int
    value: str
    result: CallResult


@dataclass(frozen=True)
class News:
    """More text of a call that runs."""

    step: Generate | Choose
    sample: int
    delta: str


class ProgramRun:
    """One run. `tell` hears of every piece of text and every call that is over."""

    def __init__(self, client: Client, tell: Callable[[News | Done], None] | None = None) -> None:
        self._client, self._tell = client, tell
        self._strands: list[Strand] = []
        self._samples: list[Strand] = []
        self._tasks: asyncio.TaskGroup | None = None
        self.done: list[Done] = []
        self.calls: list[Call] = []

    @property
    def sessions(self) -> list[Session]:
        """What it has opened so far."""
        return [strand.session for strand in self._strands + self._samples]

    @contextlib.asynccontextmanager
    async def running(
        self, steps: Sequence[Step], variables: dict[str, Value], *, tenant: str, cache_salt: str, priority: int
    ) -> AsyncIterator[Strand]:
        """Runs to the end and gives the program's own strand. Raises the first failure as an ApiError."""
        if (record := current()) is not None:
            record.claim(_width(steps))
            record.runs.append(self)
        session = self._client.open_session(tenant=tenant, cache_salt=cache_salt, priority=priority)
        main = Strand(self._client, session, variables)
        self._strands.append(main)
        finished = False
        try:
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    await self._run(steps, main)
            except ExceptionGroup as group:
                raise _first(group) from None
            finished = True
            self.done.sort(key=_in_program_order)
            yield main
        finally:
            for each in self.sessions:
                each.close() if finished else each.abort()

    async def _run(self, steps: Sequence[Step], strand: Strand) -> None:
        for step in steps:
            if isinstance(step, AddText):
                strand.write(step.text)
            elif isinstance(step, AddVariable):
                strand.write(await _text_of(strand, step))
            elif isinstance(step, Turn):
                with _named(step.path):
                    first = strand.begin_turn(step.role)
                await self._run(step.steps, strand)
                with _named(step.path):
                    strand.end_turn(step.role, first)
            elif isinstance(step, Branches):
                await self._fork(step, strand)
            else:
                await self._call(step, strand)

    async def _call(self, step: Generate | Choose, strand: Strand) -> None:
        """Starts a call; what it will give is a piece of the text, and a variable."""
        with _named(step.path):
            calls = await strand.tokenizing(lambda: self._started(step, strand))
        assert self._tasks is not None
        self.calls += calls
        texts = [self._tasks.create_task(self._watch(step, i, call)) for i, call in enumerate(calls)]
        strand.pieces.append(Piece(texts[0]))
        if step.name is not None:
            many: Value = [*texts]
            strand.variables[step.name] = texts[0] if len(texts) == 1 else many

    def _started(self, step: Generate | Choose, strand: Strand) -> list[Call]:
        if isinstance(step, Choose):
            return [strand.session.select(step.choices, step.method, step.timeout_s)]
        others = strand.fork(step.n - 1) if step.n > 1 else []
        self._samples += others
        return [
            each.session.generate(_seeded(step.sampling, index), step.constraint)
            for index, each in enumerate([strand, *others])
        ]

    async def _watch(self, step: Generate | Choose, sample: int, call: Call) -> str:
        """Follows a call to its end; its text."""
        param = step.constraint_param if isinstance(step, Generate) else None
        with _named(step.path, param):
            async with contextlib.aclosing(follow([call], only_ends=self._tell is None)) as batches:
                async for batch in batches:
                    for _, news in batch:
                        if self._tell is not None and news.text and isinstance(step, Generate):
                            self._tell(News(step, sample, news.text))
            result = call.result(0)
        done = Done(step, sample, result.text, result)
        self.done.append(done)
        if self._tell is not None:
            self._tell(done)
        return result.text

    async def _fork(self, step: Branches, strand: Strand) -> None:
        with _named(step.path):
            children = await strand.tokenizing(lambda: strand.fork(len(step.branches)))
        self._strands += children
        start, num_turns = len(strand.pieces), len(strand.turns)
        async with asyncio.TaskGroup() as tasks:
            for branch, child in zip(step.branches, children, strict=True):
                tasks.create_task(self._run(branch, child))
        for child in children:
            child.session.close()  # after its calls; it computes nothing more
        if step.join == "gather":
            strand.variables |= gathered(strand.variables, [child.variables for child in children])
            return
        for child in children:
            await strand.append_tail(child, start, num_turns)


def _width(steps: Sequence[Step]) -> int:
    """How many calls the steps have at once, at most: the samples of a gen, and all branches of a fork."""
    widest = 1
    for step in steps:
        if isinstance(step, Branches):
            widest = max(widest, sum(map(_width, step.branches)))
        elif isinstance(step, Turn):
            widest = max(widest, _width(step.steps))
        elif isinstance(step, Generate):
            widest = max(widest, step.n)
    return widest


async def _text_of(strand: Strand, step: AddVariable) -> str:
    value = strand.variables[step.name]
    for index in step.index:
        assert isinstance(value, list)
        value = value[index]
    assert not isinstance(value, list)
    return value if isinstance(value, str) else await value


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The n samples of one seed differ, and are the same each time."""
    if not index or sampling.seed is None:
        return sampling
    seed = sampling.seed + index
    return msgspec.structs.replace(sampling, seed=seed if seed < 2**63 else seed - 2**64)


@contextlib.contextmanager
def _named(path: str, constraint_param: str | None = None) -> Iterator[None]:
    """What goes wrong inside names the node."""
    try:
        yield
    except PlaitError as error:
        told = as_api_error(error, constraint_param=constraint_param)
        if told.param is None or not told.param.startswith(path):
            told.param = f"{path}.{told.param}" if told.param else path
        raise told from error


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The failure that ended the run: an ApiError where there is one."""
    found: list[Exception] = []
    for error in group.exceptions:
        found.append(_first(error) if isinstance(error, ExceptionGroup) else error)
    return next((error for error in found if isinstance(error, ApiError)), found[0])


def _in_program_order(done: Done) -> tuple[list[int], int]:
    return [int(number) for number in re.findall(r"\[(\d+)\]", done.step.path)], done.sample
