"""The `s` of a body that is being compiled: writes are recorded as steps, reads return traced values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from plait.lang.aio.state import AsyncState
from plait.lang.core.expressions import Expr, Typed, as_expr
from plait.lang.core.results import AssignedValue, Segment, TextSegment
from plait.lang.core.state import ProgramState
from plait.lang.core.state_writer import StateWriter, _checked_variable_name, reject_position_ids_offset
from plait.lang.tools.call_format import ToolCallFormat
from plait.lang.tracing.nodes import AppendToolResult, BeginScope, Cancel, EndScope, ForkInto, Read, RunTool
from plait.lang.tracing.traced_groups import AsyncTracedGroup, TracedGroup
from plait.lang.tracing.traced_result import TracedResult
from plait.lang.tracing.traced_run import TracedBranch, TracedRun, trace_expr
from plait.lang.tracing.traced_value import EvaluationContext, NodeOutput, TracedValue
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

W = TypeVar("W", bound="TracedStateWriter")


class TracedStateWriter(StateWriter):
    """The part shared by the states of plain and async bodies."""

    _branch: TracedBranch

    @property
    def _traced_run(self) -> TracedRun:
        return self._branch.run

    def __iadd__(self: W, other: str | Expr) -> W:
        trace_expr(as_expr(other), self._branch)
        return self

    def _append(self, expr: Expr) -> None:
        trace_expr(expr, self._branch)

    def set_var(self, name: str, value: Any) -> None:
        self._branch.set_variable(_checked_variable_name(name), value)

    __setitem__ = set_var

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        branch, start = self._branch, len(self._branch.segments)
        branch._add_step(BeginScope, _checked_variable_name(name))
        yield
        number, inside = branch._add_step(EndScope, name), branch.segments[start:]
        if all(isinstance(segment, TextSegment) for segment in inside):
            branch.set(name, AssignedValue("".join(segment.text() for segment in inside)))
        else:
            branch.set(name, TracedResult.of_call(branch.run, branch.lane, number, name))

    def _traced_output(self, label: str, node: int) -> TracedValue:
        """Returns the traced value of the output of step `node`."""

        def evaluate(context: EvaluationContext) -> Any:
            return context.step_output(node)

        return TracedValue(self._traced_run.placeholders, label, frozenset([NodeOutput(node, None)]), evaluate)

    def _trace_read(self, what: Literal["text", "messages", "usage"]) -> Any:
        self._mark_read()
        return self._traced_output(f"the {what} of s", self._branch._add_step(Read, what))

    def _text_of(self, name: str | Typed[Any], variable: Segment) -> Any:
        if isinstance(name, Typed):
            _check_handle(name, variable)
        if isinstance(variable, TracedResult):
            return variable.text_value()
        return variable.text()

    def _trace_tool_call(self, name: str, variable: Segment, timeout: float | None) -> Any:
        _check_tool_call(name, variable)
        self._mark_read()
        return self._traced_output(f"s.call({name!r})", self._branch._add_step(RunTool, name, timeout))

    def _trace_tool_result(self, name: str, variable: Segment, value: Any) -> Any:
        _check_tool_call(name, variable)
        self._mark_read()
        step = self._branch._add_step(AppendToolResult, name, value)
        return self._traced_output(f"s.tool_result({name!r}, ...)", step)

    def _trace_cancel(self, name: str | None) -> None:
        self._branch._add_step(Cancel, name)
        if name is None:
            self._branch.close("this text was cancelled")

    def _mark_read(self) -> None:
        self._traced_run.read_lanes.add(self._branch.lane)


class TracedState(TracedStateWriter, ProgramState):
    """The state of a plain body."""

    _branch: TracedBranch

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, Typed):
            variable = self._variable(str(name.name))
            _check_handle(name, variable)
            return variable.value()
        return self.get_var(name)

    def text_of(self, name: str | Typed[Any]) -> Any:
        return self._text_of(name, self._variable(str(name.name if isinstance(name, Typed) else name)))

    def text(self) -> Any:
        return self._trace_read("text")

    def messages(self) -> Any:
        return self._trace_read("messages")

    @property
    def usage(self) -> Any:
        return self._trace_read("usage")

    def sync(self) -> None:
        self._mark_read()

    def text_iter(self, var_name: str | None = None) -> Iterator[Any]:
        yield self.text() if var_name is None else self.text_of(var_name)

    def get_meta_info(self, name: str | Typed[Any]) -> Any:
        return self._variable(str(name.name if isinstance(name, Typed) else name)).meta()

    def weight(self, name: str | Typed[Any]) -> Any:
        return self._variable(str(name.name if isinstance(name, Typed) else name)).weight()

    def logprob(self, name: str | Typed[Any]) -> Any:
        return self._variable(str(name.name if isinstance(name, Typed) else name)).logprob()

    def partial(self, name: str | Typed[Any]) -> Any:
        return self[name]

    def partial_iter(self, name: str | Typed[Any]) -> Iterator[Any]:
        yield self[name]

    def call(self, name: str, timeout: float | None = None) -> Any:
        return self._trace_tool_call(name, self._variable(name), timeout)

    def tool_result(self, name: str, value: Any) -> Any:
        return self._trace_tool_result(name, self._variable(name), value)

    def fork(self, size: int = 1, position_ids_offset: object = None) -> TracedGroup:
        reject_position_ids_offset(position_ids_offset)
        branches, number = _trace_fork(self._branch, size)
        group = TracedGroup([TracedState(branch) for branch in branches], self)
        self._traced_run.track_fork(number, [group, *group.states])
        return group

    def cancel(self) -> None:
        self._trace_cancel(None)

    def abort(self, name: str | None = None) -> None:
        if name is not None:
            self._variable(name)
        self._trace_cancel(name)

    def show(self, path: str | Path | None = None) -> Path:
        raise InputError("compile: nothing has run yet, so there is nothing to show")

    def __str__(self) -> str:
        return f"ProgramState({self.text()})"


class AsyncTracedState(TracedStateWriter, AsyncState):
    """The state of an async body."""

    _branch: TracedBranch

    async def get_var(self, name: str | Typed[Any]) -> Any:
        variable = await self._variable(str(name.name) if isinstance(name, Typed) else name)
        if isinstance(name, Typed):
            _check_handle(name, variable)
        return variable.value()

    async def text_of(self, name: str | Typed[Any]) -> Any:
        return self._text_of(name, await self._variable(str(name.name if isinstance(name, Typed) else name)))

    async def text(self) -> Any:
        return self._trace_read("text")

    async def messages(self) -> Any:
        return self._trace_read("messages")

    async def usage(self) -> Any:
        return self._trace_read("usage")

    async def sync(self) -> None:
        self._mark_read()

    async def stream(self, name: str | None = None) -> AsyncIterator[Any]:
        yield await (self.text() if name is None else self.text_of(name))

    text_async_iter = stream

    async def get_meta_info(self, name: str | Typed[Any]) -> Any:
        return (await self._variable(str(name.name if isinstance(name, Typed) else name))).meta()

    async def weight(self, name: str | Typed[Any]) -> Any:
        return (await self._variable(str(name.name if isinstance(name, Typed) else name))).weight()

    async def logprob(self, name: str | Typed[Any]) -> Any:
        return (await self._variable(str(name.name if isinstance(name, Typed) else name))).logprob()

    async def partial(self, name: str | Typed[Any]) -> Any:
        return await self.get_var(name)

    async def stream_partial(self, name: str | Typed[Any]) -> AsyncIterator[Any]:
        yield await self.get_var(name)

    partial_async_iter = stream_partial

    async def call(self, name: str, timeout: float | None = None) -> Any:
        return self._trace_tool_call(name, await self._variable(name), timeout)

    async def tool_result(self, name: str, value: Any) -> Any:
        return self._trace_tool_result(name, await self._variable(name), value)

    def fork(self, size: int = 1, position_ids_offset: object = None) -> AsyncTracedGroup:
        reject_position_ids_offset(position_ids_offset)
        branches, number = _trace_fork(self._branch, size)
        group = AsyncTracedGroup([AsyncTracedState(branch) for branch in branches], self)
        self._traced_run.track_fork(number, [group, *group.states])
        return group

    def cancel(self) -> None:
        self._trace_cancel(None)

    def abort(self, name: str | None = None) -> None:
        self._trace_cancel(name)


def _trace_fork(branch: TracedBranch, size: int) -> tuple[list[TracedBranch], int]:
    """Forks `branch`. Returns the new branches and the number of the step."""
    children = cast("list[TracedBranch]", branch.fork(size))
    return children, branch._add_step(ForkInto, tuple(child.lane for child in children))


def _check_tool_call(name: str, variable: Segment) -> None:
    if not isinstance(variable, TracedResult) or not isinstance(variable.value_format, ToolCallFormat):
        raise InputError(f"variable {name!r} is not a tool call: it does not come from gen({name!r}, tools=[...])")


def _check_handle(handle: Typed[Any], variable: Segment) -> None:
    """Raises InputError, as a run does, unless the variable is the result of this very gen."""
    if not isinstance(variable, TracedResult) or variable.value_format is not handle.value_format or variable.n > 1:
        raise InputError(
            f"variable {handle.name!r} is not the value of this gen: it was set again, joined or sampled n times; "
            f"read s[{handle.name!r}]"
        )
