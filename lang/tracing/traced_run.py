"""`TracedRun` and `TracedBranch`: record the steps of a body that runs without a model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

from plait.lang.backends.chat_messages import TURN_MARK_TEMPLATE
from plait.lang.backends.remote_client import RemoteTokenizer
from plait.lang.backends.without_runtime import ClientWithoutRuntime
from plait.lang.core.branch import Branch
from plait.lang.core.expressions import (
    CallExpr,
    Concat,
    Expr,
    Gen,
    GenToolCall,
    Role,
    RoleBegin,
    RoleEnd,
    Select,
    SystemWithTools,
    Text,
)
from plait.lang.core.results import AssignedValue, Segment, TextSegment
from plait.lang.core.run import Run
from plait.lang.sampling_options import Options
from plait.lang.source_location import caller_location
from plait.lang.tools.call_format import ToolCallFormat, tool_call_format
from plait.lang.tracing.nodes import Act, Adopt, Append, ForkInto, Join, Node
from plait.lang.tracing.traced_result import TracedResult
from plait.lang.tracing.traced_value import NodeOutput, Placeholders, TracedValue
from plait.runtime.client.session import check_fork_size
from plait.runtime.errors import InputError
from plait.runtime.programs.branch import ForkPoint
from plait.runtime.programs.variables import gather_variables

if TYPE_CHECKING:
    from plait.lang.states.fork_group import JoinMode
    from plait.runtime.programs.backend import BackendClient, BackendSession
    from plait.runtime.programs.steps import Step
    from plait.runtime.tokenizer.chat_template import ChatTemplate
    from plait.runtime.tokenizer.turn_texts import TurnShape


class TracedRun(Run):
    """Records the steps of one body, in order. A Run that makes no calls."""

    def __init__(self, program: str, defaults: Options, template: ChatTemplate | None) -> None:
        self._has_template = template is not None
        super().__init__(program, cast("BackendClient", _NullClient(template or TURN_MARK_TEMPLATE)), defaults)
        self.placeholders = Placeholders(program)
        self.nodes: list[Node] = []
        self.statement = 0
        """The number of the expression that is recorded now."""
        self.scope_starts: dict[int, int] = {}
        """By the step that begins a scope, its first segment."""
        self.read_branches: set[int] = set()
        """The branches from which something was read."""
        self.forks: list[tuple[int, list[weakref.ref[Branch]]]] = []
        """For each fork its step, and weak references to its branches, which their states and the group hold."""

    def _template_of(self, client: BackendClient) -> ChatTemplate | None:
        """The backend's template; without a backend one that marks turns, whatever the variables are."""
        return super()._template_of(client) if self._has_template else TURN_MARK_TEMPLATE

    def _notify_run_listeners(self) -> None:
        """Does nothing: listeners are for real runs."""

    def check_has_run(self) -> None:
        raise InputError("compile: nothing has run yet, so there is nothing to show")

    def add_node(self, node: Node) -> int:
        """Appends a step and returns its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1


class TracedBranch(Branch):
    """A branch whose calls are recorded and not made. Its text may contain traced values."""

    run: TracedRun
    has_text = False
    """Whether there is text, so that a call has a prompt."""

    def write(self, text: str, *, control: bool = False) -> None:
        self.session()
        self.has_text = self.has_text or bool(text)
        if control:
            self.add_segment(TextSegment(text, control))
            return
        for piece in self.run.placeholders.split(text):
            self._append_value(piece) if isinstance(piece, TracedValue) else self._append_text(piece)

    def append_traced(self, expr: Expr) -> None:
        """Appends a traced value, which must be text."""
        assert isinstance(expr, TracedValue)
        if expr._value_format is not None and (type_name := expr._value_format.type_name) != "str":
            raise InputError(f"only text and expressions can be appended, not {type_name}; write str(...)")
        self._append_value(expr)

    def _append_value(self, value: TracedValue) -> None:
        self.session()
        self.has_text = True
        for piece in value._parts or (value,):
            if isinstance(piece, str):
                self._append_text(piece)
                continue
            number = self._add_step(piece)
            self.add_segment(TracedResult(self.run, self.branch_id, NodeOutput(number, None), base=piece))

    def begin_call(self, expr: CallExpr, following: Sequence[Step] = ()) -> None:
        """Records a call. Raises InputError for what a run would refuse as well, such as an empty prompt."""
        self.session()
        gen = expr._call
        n, value_format = 1, gen.value_format if isinstance(gen, Gen | Select) else None
        if not self.has_text:
            raise InputError(f"the prompt is empty: add text before {'select' if isinstance(gen, Select) else 'gen'}")
        if isinstance(gen, Gen | GenToolCall):
            _, n = gen.options.merged_over(self.run.defaults)
        if isinstance(gen, GenToolCall):
            value_format = tool_call_format(gen.tools, gen.choice, value=gen.value_format)
        output = NodeOutput(self._add_step(expr), gen.name)
        result = TracedResult(self.run, self.branch_id, output, n, value_format)
        self.add_segment(result)
        if gen.name is not None:
            self.variables[gen.name] = result
        for name in expr._variables:
            if name != gen.name:
                self.variables[name] = TracedResult(self.run, self.branch_id, NodeOutput(output.node, name), n)

    # -- the methods of `Branch`, recorded --------------------------------------------------------

    def append(self, expr: Expr, following: Sequence[Step] = ()) -> None:
        self.run.statement += 1
        super().append(expr, following)

    def begin_role(self, role: str, following: Sequence[Step]) -> None:
        """Records the beginning of a turn. How the turn begins is found when the graph runs."""
        self.begin_turn(role)

    def begin_turn(self, role: str, shape: TurnShape | None = None, without: str = "") -> None:
        super().begin_turn(role, shape, without)
        self._add_step(RoleBegin(cast("Role", role)))

    def end_turn(self, role: str) -> None:
        super().end_turn(role)
        self._add_step(RoleEnd(cast("Role", role)))

    def write_system_turn(self, turn: SystemWithTools) -> None:
        """Records one step. The content adds none, and can be text only."""
        parts = turn.content.parts if isinstance(turn.content, Concat) else (turn.content,)
        if not all(isinstance(part, Text | TracedValue) for part in parts):
            raise InputError("compile: a system turn that lists tools can contain text only")
        number = self._add_step(turn)
        self.begin_turn("system")
        for part in parts:
            super().append(part)
        self.end_turn("system")
        del self.run.nodes[number + 1 :]

    def assign(self, name: str, value: Any) -> None:
        if not isinstance(value, TracedValue):
            super().assign(name, value)
        number = self._add_step(Act, "set", name, value)
        if isinstance(value, TracedValue):
            self.set(name, TracedResult(self.run, self.branch_id, NodeOutput(number, name), base=value))

    def begin_scope(self, name: str) -> int:
        number = self._add_step(Act, "begin scope", name)
        self.run.scope_starts[number] = super().begin_scope(name)
        return number

    def end_scope(self, name: str, start: int) -> None:
        number, inside = self._add_step(Act, "end scope", name, start), self.segments[self.run.scope_starts[start] :]
        if all(isinstance(segment, TextSegment) for segment in inside):
            self.set(name, AssignedValue("".join(segment.text() for segment in inside)))
        else:
            self.set(name, TracedResult(self.run, self.branch_id, NodeOutput(number, name)))

    def text_segments(self) -> list[Segment]:
        text = self._read("text")
        return [TracedResult(self.run, self.branch_id, NodeOutput(len(self.run.nodes) - 1, None), base=text)]

    def read_text(self) -> Any:
        return self._read("text")

    def read_messages(self) -> Any:
        return self._read("messages")

    def read_usage(self) -> Any:
        return self._read("usage")

    def _read(self, what: Literal["text", "messages", "usage"]) -> TracedValue:
        return self._output(f"the {what} of s", "read", what)

    def _output(self, label: str, action: str, *details: Any) -> TracedValue:
        """Adds a step that reads this branch, and returns the traced value of its output."""
        self.run.read_branches.add(self.branch_id)
        node = self._add_step(Act, action, *details)
        sources = frozenset([NodeOutput(node, None)])
        return TracedValue(self.run.placeholders, label, sources, lambda context: context.step_output(node))

    def awaited_call_segments(self) -> list[Any]:
        self.run.read_branches.add(self.branch_id)
        return []

    def call_tool(self, name: str, variable: Segment, timeout: float | None) -> Any:
        _check_tool_call(name, variable)
        return self._output(f"s.call({name!r})", "run tool", name, timeout)

    async def call_tool_async(self, name: str, variable: Segment, timeout: float | None) -> Any:
        return self.call_tool(name, variable, timeout)

    def append_tool_result(self, name: str, variable: Segment, value: Any) -> Any:
        _check_tool_call(name, variable)
        return self._output(f"s.tool_result({name!r}, ...)", "append result", name, value)

    def cancel(self, reason: str) -> None:
        self.abort_variable(None, None)

    def abort_variable(self, name: str | None, variable: Segment | None) -> None:
        self._add_step(Act, "end", name)
        if name is None:
            self.close("this text was cancelled")

    def fork(self, size: int) -> list[Self]:
        children = super().fork(size)
        for child in children:
            child.has_text = self.has_text
        number = self._add_step(ForkInto, tuple(child.branch_id for child in children))
        self.run.forks.append((number, [weakref.ref(child) for child in children]))
        return children

    def join(self, children: Sequence[Branch], mode: JoinMode, point: ForkPoint, winners: int | None = None) -> None:
        number = self._add_step(Join, self._read_branches_of(children), mode, winners)
        if winners is not None:
            self._join_winners(number, children, mode, point, winners)
        elif mode == "gather_variable":
            for name, found in gather_variables(point.names, [child.variables for child in children]).items():
                values = [_relabel(variable.value(), f"s[{name!r}][{i}]") for i, variable in enumerate(found)]
                self.variables[name] = AssignedValue(values)
        else:
            super().join(children, mode, point)

    def _join_winners(
        self, number: int, children: Sequence[Branch], mode: JoinMode, point: ForkPoint, winners: int
    ) -> None:
        """Sets the variables that all branches have. Which branches won is known at run time only."""
        if mode != "gather_variable":
            raise InputError("compile: the winners of a race are not known, so only their variables can be joined")
        for name in set.intersection(*(set(child.variables) - point.names for child in children)):
            self.variables[name] = TracedResult(self.run, self.branch_id, NodeOutput(number, name), winners)

    def trace_race(self, forks: Any, first: int) -> Any:
        won = type(forks)(forks.states, forks.src_state, forks)
        won.states, won.num_winners = _UnknownWinners(forks.states, self.run.placeholders), first
        return won

    def begin_adopt(self, winner: Branch, children: Sequence[Branch]) -> None:
        self._add_step(Adopt, self._read_branches_of(children), children.index(winner))

    def _read_branches_of(self, children: Sequence[Branch]) -> tuple[int, ...]:
        branch_ids = tuple(child.branch_id for child in children)
        self.run.read_branches.update(branch_ids)
        return branch_ids

    def copy_segment(self, segment: Segment) -> None:
        self.add_segment(segment)

    def _append_text(self, text: str) -> None:
        self._add_step(Text(text))
        self.add_segment(TextSegment(text))

    def _add_step(self, what: Any, *details: Any) -> int:
        node = (
            Append(self.branch_id, caller_location(), what, self.run.statement)
            if isinstance(what, Expr)
            else what(self.branch_id, caller_location(), *details)
        )
        return self.run.add_node(node)


class _UnknownWinners(list[Any]):
    """The winners of a race; only their number is known."""

    def __init__(self, states: Sequence[Any], placeholders: Placeholders) -> None:
        super().__init__(states)
        self._placeholders = placeholders

    def _refuse(self, *_: object) -> NoReturn:
        self._placeholders.refuse("which branch wins a race is known at run time only; join the race")

    __getitem__ = __iter__ = _refuse


def _relabel(value: Any, label: str) -> Any:
    """Returns the value of a branch with the source text that it has after the join."""
    return replace(value, _label=label) if isinstance(value, TracedValue) else value


def _check_tool_call(name: str, variable: Segment) -> None:
    if not isinstance(variable, TracedResult) or not isinstance(variable.value_format, ToolCallFormat):
        raise InputError(f"variable {name!r} is not a tool call: it does not come from gen({name!r}, tools=[...])")


class _NullClient(ClientWithoutRuntime):
    """What a branch needs of a client."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(None, RemoteTokenizer(template))

    def open_session(self, *, program: int | None = None) -> BackendSession:
        return cast("BackendSession", _NullSession())


class _NullSession:
    """A session that checks its arguments and sends nothing; the branch keeps the text."""

    def fork(self, size: int, adapter: str | None = None) -> list[_NullSession]:
        check_fork_size(size)
        return [_NullSession() for _ in range(size)]

    def abort(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
