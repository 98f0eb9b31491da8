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
from plait.runtime.client.session import Session
from plait.runtime.client.stream import stream_updates
from plait.runtime.errors import PlaitError
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.errors import ApiError, as_api_error
from plait.runtime.server.in_flight import current_request
from plait.runtime.server.protocols.programs.branch import ProgramBranch, TextPiece, Value
from plait.runtime.server.protocols.programs.compiler import (
    ForkStep,
    GenStep,
    RoleStep,
    SelectStep,
    Step,
    TextStep,
    VariableStep,
    gather_variables,
)


@dataclass(frozen=True)
class FinishedCall:
    """A call that is over. `sample`: which of a gen's n."""

    step: GenStep | SelectStep
    sample: int
    value: str
    result: CallResult


@dataclass(frozen=True)
class TextDelta:
    """More text of a call that runs."""

    step: GenStep | SelectStep
    sample: int
    delta: str


class ProgramRun:
    """One run. `on_event` hears of every piece of text and every call that is over."""

    def __init__(self, client: Client, on_event: Callable[[TextDelta | FinishedCall], None] | None = None) -> None:
        self._client, self._on_event = client, on_event
        self._branches: list[ProgramBranch] = []
        self._samples: list[ProgramBranch] = []
        self._tasks: asyncio.TaskGroup | None = None
        self.done: list[FinishedCall] = []
        self.calls: list[Call] = []

    @property
    def sessions(self) -> list[Session]:
        """What it has opened so far."""
        return [program_branch.session for program_branch in self._branches + self._samples]

    @contextlib.asynccontextmanager
    async def running(
        self, steps: Sequence[Step], variables: dict[str, Value], *, tenant: str, cache_salt: str, priority: int
    ) -> AsyncIterator[ProgramBranch]:
        """Runs to the end and gives the program's own strand. Raises the first failure as an ApiError."""
        if (record := current_request()) is not None:
            record.reserve_calls(_max_concurrent_calls(steps))
            record.handles.append(self)
        session = self._client.open_session(tenant=tenant, cache_salt=cache_salt, priority=priority)
        main = ProgramBranch(self._client, session, variables)
        self._branches.append(main)
        finished = False
        try:
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    await self._run(steps, main)
            except ExceptionGroup as group:
                raise _first_error(group) from None
            finished = True
            self.done.sort(key=_in_program_order)
            yield main
        finally:
            for each in self.sessions:
                each.close() if finished else each.abort()

    async def _run(self, steps: Sequence[Step], program_branch: ProgramBranch) -> None:
        for step in steps:
            if isinstance(step, TextStep):
                program_branch.write(step.text)
            elif isinstance(step, VariableStep):
                program_branch.write(await _text_of(program_branch, step))
            elif isinstance(step, RoleStep):
                with _errors_named(step.path):
                    first = program_branch.begin_turn(step.role)
                await self._run(step.steps, program_branch)
                with _errors_named(step.path):
                    program_branch.end_turn(step.role, first)
            elif isinstance(step, ForkStep):
                await self._fork(step, program_branch)
            else:
                await self._call(step, program_branch)

    async def _call(self, step: GenStep | SelectStep, program_branch: ProgramBranch) -> None:
        """Starts a call; what it will give is a piece of the text, and a variable."""
        with _errors_named(step.path):
            calls = await program_branch.run_tokenizing(lambda: self._started(step, program_branch))
        assert self._tasks is not None
        self.calls += calls
        texts = [self._tasks.create_task(self._watch(step, i, call)) for i, call in enumerate(calls)]
        program_branch.pieces.append(TextPiece(texts[0]))
        if step.name is not None:
            many: Value = [*texts]
            program_branch.variables[step.name] = texts[0] if len(texts) == 1 else many

    def _started(self, step: GenStep | SelectStep, program_branch: ProgramBranch) -> list[Call]:
        if isinstance(step, SelectStep):
            return [program_branch.session.select(step.choices, step.method, step.timeout_s)]
        others = program_branch.fork(step.n - 1) if step.n > 1 else []
        self._samples += others
        return [
            each.session.generate(_with_seed_offset(step.sampling, index), step.constraint)
            for index, each in enumerate([program_branch, *others])
        ]

    async def _watch(self, step: GenStep | SelectStep, sample: int, call: Call) -> str:
        """Follows a call to its end; its text."""
        param = step.constraint_param if isinstance(step, GenStep) else None
        with _errors_named(step.path, param):
            async with contextlib.aclosing(stream_updates([call], only_final=self._on_event is None)) as batches:
                async for batch in batches:
                    for _, update in batch:
                        if self._on_event is not None and update.text and isinstance(step, GenStep):
                            self._on_event(TextDelta(step, sample, update.text))
            result = call.result(0)
        done = FinishedCall(step, sample, result.text, result)
        self.done.append(done)
        if self._on_event is not None:
            self._on_event(done)
        return result.text

    async def _fork(self, step: ForkStep, program_branch: ProgramBranch) -> None:
        with _errors_named(step.path):
            children = await program_branch.run_tokenizing(lambda: program_branch.fork(len(step.branches)))
        self._branches += children
        start, num_turns = len(program_branch.pieces), len(program_branch.turns)
        async with asyncio.TaskGroup() as tasks:
            for branch, child in zip(step.branches, children, strict=True):
                tasks.create_task(self._run(branch, child))
        for child in children:
            child.session.close()  # after its calls; it computes nothing more
        if step.join == "gather":
            program_branch.variables |= gather_variables(
                program_branch.variables, [child.variables for child in children]
            )
            return
        for child in children:
            await program_branch.append_tail(child, start, num_turns)


def _max_concurrent_calls(steps: Sequence[Step]) -> int:
    """How many calls the steps have at once, at most: the samples of a gen, and all branches of a fork."""
    widest = 1
    for step in steps:
        if isinstance(step, ForkStep):
            widest = max(widest, sum(map(_max_concurrent_calls, step.branches)))
        elif isinstance(step, RoleStep):
            widest = max(widest, _max_concurrent_calls(step.steps))
        elif isinstance(step, GenStep):
            widest = max(widest, step.n)
    return widest


async def _text_of(program_branch: ProgramBranch, step: VariableStep) -> str:
    value = program_branch.variables[step.name]
    for index in step.index:
        assert isinstance(value, list)
        value = value[index]
    assert not isinstance(value, list)
    return value if isinstance(value, str) else await value


def _with_seed_offset(sampling: SamplingParams, index: int) -> SamplingParams:
    """The n samples of one seed differ, and are the same each time."""
    if not index or sampling.seed is None:
        return sampling
    seed = sampling.seed + index
    return msgspec.structs.replace(sampling, seed=seed if seed < 2**63 else seed - 2**64)


@contextlib.contextmanager
def _errors_named(path: str, constraint_param: str | None = None) -> Iterator[None]:
    """What goes wrong inside names the node."""
    try:
        yield
    except PlaitError as error:
        told = as_api_error(error, constraint_param=constraint_param)
        if told.param is None or not told.param.startswith(path):
            told.param = f"{path}.{told.param}" if told.param else path
        raise told from error


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    """The failure that ended the run: an ApiError where there is one."""
    found: list[Exception] = []
    for error in group.exceptions:
        found.append(_first_error(error) if isinstance(error, ExceptionGroup) else error)
    return next((error for error in found if isinstance(error, ApiError)), found[0])


def _in_program_order(done: FinishedCall) -> tuple[list[int], int]:
    return [int(number) for number in re.findall(r"\[(\d+)\]", done.step.path)], done.sample
