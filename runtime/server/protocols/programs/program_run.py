"""Runs a program's steps in one session and its forks.

Calls are submitted in program order without waiting for results; a task per call follows it. Only steps that need a
value wait: a `var`, and a fork with "append". The first failure, a cancellation and `ProgramRun.abort` end all sessions
of the program, those of its forks and samples included, with the calls in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.session import Session
from plait.runtime.client.stream import stream_updates
from plait.runtime.errors import Aborted, PlaitError
from plait.runtime.programs.steps import TextStep
from plait.runtime.programs.variables import gather_variables
from plait.runtime.server.errors import ApiError, as_api_error, invalid
from plait.runtime.server.in_flight import current_request
from plait.runtime.server.protocols.programs.branch import ProgramBranch, TextPiece, Value
from plait.runtime.server.protocols.programs.compiler import (
    CompiledProgram,
    ForkStep,
    GenStep,
    SelectStep,
    Step,
    TurnBegin,
    TurnEnd,
    VariableStep,
)
from plait.runtime.server.protocols.programs.following_text import text_behind, text_of
from plait.runtime.tokenizer.chat_template import ChatTemplate

# The template renders all turns of a branch for each new one, in 20 us a turn. 300 turns in a row are 45,000.
MAX_RENDERED_TURNS = 50_000
# Some milliseconds of work, after which the event loop serves other requests.
TEXTS_AT_ONCE = 500
BRANCHES_AT_ONCE = 16


@dataclass(frozen=True)
class FinishedCall:
    """A finished call. `sample`: its number among a gen's n."""

    step: GenStep | SelectStep
    sample: int
    value: str
    result: CallResult


@dataclass(frozen=True)
class TextDelta:
    """New text of a running call."""

    step: GenStep | SelectStep
    sample: int
    delta: str


class ProgramRun:
    """One run of a program. `on_event` is called for each new text and each finished call.

    `template`: the chat template of the turns, None for the model's own.
    """

    def __init__(
        self,
        client: Client,
        on_event: Callable[[TextDelta | FinishedCall], None] | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self._client, self._on_event = client, on_event
        self._template = template or client.tokenizer.chat_template
        self._tasks: asyncio.TaskGroup | None = None
        self._abort_reason = ""
        self._num_rendered_turns = 0
        self.sessions: list[Session] = []  # all that were opened so far
        self.done: list[FinishedCall] = []
        self.calls: list[Call] = []

    def abort(self, reason: str = "the program was aborted") -> None:
        """Ends the program, which raises ApiError 503, code "aborted", unless all its calls have ended."""
        self._abort_reason = self._abort_reason or reason
        self._abort_sessions()

    def _abort_sessions(self) -> None:
        for session in self.sessions:
            session.abort()

    @contextlib.asynccontextmanager
    async def running(
        self, program: CompiledProgram, variables: dict[str, Value], *, tenant: str, cache_salt: str, priority: int
    ) -> AsyncIterator[ProgramBranch]:
        """Runs the program and gives the main branch at their end. Raises the first failure, as ApiError if it can."""
        if (record := current_request()) is not None:
            record.reserve_program(program.max_calls)
            record.handles.append(self)
        await asyncio.sleep(0)  # checking a long program took some milliseconds
        session = self._client.open_session(
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
            adapter="" if record is None else record.adapter,
        )
        self.sessions.append(session)
        main = ProgramBranch(self._client, session, self.sessions, self._template)
        main.variables = variables
        finished = False
        try:
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    await self._run(program.steps, main)
            except ExceptionGroup as group:
                error = as_api_error(Aborted(self._abort_reason)) if self._abort_reason else _first_error(group)
                raise error from None
            finished = True
            self.done.sort(key=_in_program_order)
            yield main
        finally:
            if not finished:
                self._abort_sessions()
            for open_session in self.sessions:
                open_session.close()

    async def _run(self, steps: Sequence[Step], program_branch: ProgramBranch) -> None:
        for index, step in enumerate(steps):
            if isinstance(step, TextStep):
                program_branch.write(step.text)
                if index % TEXTS_AT_ONCE == TEXTS_AT_ONCE - 1:
                    await asyncio.sleep(0)
            elif isinstance(step, VariableStep):
                program_branch.write(await text_of(program_branch, step))
            elif isinstance(step, TurnBegin):
                with _errors_named(step.path):
                    self._count_turns(step, len(program_branch.turns) + 1)
                    await program_branch.begin_turn_aside(step.role)
            elif isinstance(step, TurnEnd):
                with _errors_named(step.path):
                    program_branch.end_turn(step.role)
            elif isinstance(step, ForkStep):
                await self._fork(step, program_branch)
            else:
                await self._call(step, program_branch, await text_behind(steps, index, program_branch))

    def _count_turns(self, step: TurnBegin, count: int) -> None:
        """Counts the turns that the template renders for this one. Raises ApiError 400 if there are too many."""
        self._num_rendered_turns += count
        if self._num_rendered_turns > MAX_RENDERED_TURNS:
            text = f"the program has too many turns: the chat template would render more than {MAX_RENDERED_TURNS}"
            raise invalid(text, step.path)

    async def _call(self, step: GenStep | SelectStep, program_branch: ProgramBranch, followed_by: str) -> None:
        """Starts a call. Its text becomes a piece of the branch's text, and a variable."""
        with _errors_named(step.path):
            calls = await program_branch.run_tokenizing(
                lambda: _submit(step, program_branch, followed_by), self._abort_sessions
            )
        self.calls += calls
        texts = [self._start(self._follow(step, i, call)) for i, call in enumerate(calls)]
        program_branch.add_segment(TextPiece(texts[0]))
        if step.name is not None:
            samples: Value = [*texts]
            program_branch.variables[step.name] = texts[0] if len(texts) == 1 else samples

    def _start(self, following: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
        """Runs a coroutine as a task of the program. Raises CancelledError if the program is ending meanwhile.

        Another branch may fail in the same iteration of the event loop in which this one goes on.
        """
        assert self._tasks is not None
        try:
            return self._tasks.create_task(following)
        except RuntimeError:
            following.close()
            raise asyncio.CancelledError from None

    async def _follow(self, step: GenStep | SelectStep, sample: int, call: Call) -> str:
        """Follows a call to its end and returns its text."""
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
            children = await program_branch.run_tokenizing(
                lambda: program_branch.fork(len(step.branches)), self._abort_sessions
            )
        point = program_branch.fork_point()
        async with asyncio.TaskGroup() as tasks:
            for number, (branch, child) in enumerate(zip(step.branches, children, strict=True), 1):
                tasks.create_task(self._run(branch, child))
                if number % BRANCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        for child in children:
            child.session().close()  # takes effect after its calls; an abort ends them
        if step.join == "gather":
            program_branch.variables |= gather_variables(point.names, [child.variables for child in children])
            return
        for child in children:
            await child.text(point.num_segments)  # its calls end
            program_branch.append_from_child(child, point)


def _submit(step: GenStep | SelectStep, program_branch: ProgramBranch, followed_by: str) -> list[Call]:
    if isinstance(step, SelectStep):
        draw = step.sampling if step.method == "exact" else None
        return [program_branch.start_select(step.name, step.choices, step.method, step.timeout_s, draw, step.same_seed)]
    sampling = program_branch.seed_path.params_of_next_gen(step.sampling, same_seed=step.same_seed)
    return program_branch.start_gen(step.name, sampling, step.constraint, step.n, followed_by)


@contextlib.contextmanager
def _errors_named(path: str, constraint_param: str | None = None) -> Iterator[None]:
    """Raises PlaitErrors of the block as ApiError, with the node's path as `param`."""
    try:
        yield
    except PlaitError as error:
        api_error = as_api_error(error, constraint_param=constraint_param)
        if api_error.param is None or not api_error.param.startswith(path):
            api_error.param = f"{path}.{api_error.param}" if api_error.param else path
        raise api_error from error


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    """The failure that ended the run: the first ApiError, or else the first error."""
    errors = [_first_error(error) if isinstance(error, ExceptionGroup) else error for error in group.exceptions]
    return next((error for error in errors if isinstance(error, ApiError)), errors[0])


def _in_program_order(done: FinishedCall) -> tuple[list[int], int]:
    return [int(number) for number in re.findall(r"\[(\d+)\]", done.step.path)], done.sample
