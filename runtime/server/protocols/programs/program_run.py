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
from plait.runtime.errors import Aborted, InputError, PlaitError
from plait.runtime.programs.steps import Step
from plait.runtime.programs.variables import gather_variables
from plait.runtime.server.errors import ApiError, as_api_error
from plait.runtime.server.generation.submission import open_session
from plait.runtime.server.in_flight import current_request
from plait.runtime.server.protocols.programs.branch import ProgramBranch, TextPiece, Value
from plait.runtime.server.protocols.programs.program_compiler import CompiledProgram
from plait.runtime.server.protocols.programs.steps import CallStep, ForkStep, GenStep, ProgramStep
from plait.runtime.tokenizer.chat_template import ChatTemplate

# The template renders up to 31 turns of a branch for a new one, in 20 us a turn; some templates render all of them.
MAX_RENDERED_TURNS = 50_000
# Some milliseconds of work, after which the event loop serves other requests.
STEPS_AT_ONCE = 500
BRANCHES_AT_ONCE = 16


@dataclass(frozen=True)
class FinishedCall:
    """A finished call. `sample`: its number among a gen's n."""

    step: CallStep
    sample: int
    value: str
    result: CallResult


@dataclass(frozen=True)
class TextDelta:
    """New text of a running call."""

    step: CallStep
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
        self.client, self._on_event = client, on_event
        self.template = template or client.tokenizer.chat_template
        self._tasks: asyncio.TaskGroup | None = None
        self._abort_reason = ""
        self._num_rendered_turns = 0
        self.sessions: list[Session] = []  # all that were opened so far
        self.done: list[FinishedCall] = []
        self.calls: list[Call] = []

    def abort(self, reason: str = "the program was aborted") -> None:
        """Ends the program, which raises ApiError 503, code "aborted", unless all its calls have ended."""
        self._abort_reason = self._abort_reason or reason
        self.abort_sessions()

    def abort_sessions(self) -> None:
        """Ends all sessions of the program, with the calls in them."""
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
        session = open_session(self.client, tenant, cache_salt, priority)
        self.sessions.append(session)
        main = ProgramBranch(self, session)
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
                self.abort_sessions()
            for opened in self.sessions:
                opened.close()

    async def _run(self, steps: Sequence[ProgramStep], program_branch: ProgramBranch) -> None:
        for index, step in enumerate(steps):
            with _errors_named(step.path):
                waiting = step._run_on(program_branch, steps[index + 1 :])
                if waiting is not None:
                    await waiting
            if index % STEPS_AT_ONCE == STEPS_AT_ONCE - 1:
                await asyncio.sleep(0)

    def count_turns(self, count: int) -> None:
        """Counts turns that the template renders for a new one. Raises InputError if there are too many."""
        self._num_rendered_turns += count
        if self._num_rendered_turns > MAX_RENDERED_TURNS:
            raise InputError(
                f"the program has too many turns: the chat template would render more than {MAX_RENDERED_TURNS}"
            )

    async def call(self, step: CallStep, program_branch: ProgramBranch, following: Sequence[Step]) -> None:
        """Starts a call. Its text becomes a piece of the branch's text, and a variable."""
        trailing_text = await step.trailing_text(program_branch, following)
        calls = await program_branch.run_tokenizing(lambda: step.start(program_branch, trailing_text))
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

    async def _follow(self, step: CallStep, sample: int, call: Call) -> str:
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

    async def fork(self, step: ForkStep, program_branch: ProgramBranch) -> None:
        """Runs the branches of a fork side by side, and joins them."""
        children = await program_branch.run_tokenizing(lambda: program_branch.fork(len(step.branches)))
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
