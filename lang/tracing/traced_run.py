"""`TracedRun` and `TracedBranch`: record the steps of a body that runs without a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from plait.lang.backends.chat_messages import TURN_MARK_TEMPLATE
from plait.lang.backends.remote_client import RemoteTokenizer
from plait.lang.core.branch import Branch
from plait.lang.core.expressions import (
    Concat,
    Expr,
    Gen,
    GenToolCall,
    RoleBegin,
    RoleEnd,
    Select,
    SystemWithTools,
    Text,
)
from plait.lang.core.results import AssignedValue, Segment, TextSegment
from plait.lang.core.run import Run
from plait.lang.derived.captures import GenWithCaptures, call_of, variables_of
from plait.lang.derived.reasoning import SeparateReasoning
from plait.lang.sampling_options import Options
from plait.lang.source_location import caller_location
from plait.lang.tools.call_format import tool_call_format
from plait.lang.tools.call_syntax import DEFAULT_CALL_SYNTAX
from plait.lang.tracing.nodes import Append, Node, SetVariable
from plait.lang.tracing.traced_result import TracedResult
from plait.lang.tracing.traced_value import NodeOutput, Placeholders, TracedValue
from plait.runtime.client.session import check_fork_size
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.run import AnySession
    from plait.runtime.client.client import Client
    from plait.runtime.client.session import Session
    from plait.runtime.tokenizer.chat_template import ChatTemplate


class TracedRun(Run):
    """Records the steps of one body, in order. A Run that makes no calls."""

    def __init__(self, program: str, defaults: Options, template: ChatTemplate | None) -> None:
        self._has_template = template is not None
        super().__init__(program, cast("Client", _NullClient(template or TURN_MARK_TEMPLATE)), defaults)
        self.placeholders = Placeholders(program)
        self.nodes: list[Node] = []
        self.statement = 0
        """The number of the expression that is recorded now."""
        self.read_lanes: set[int] = set()
        """The branches from which something was read."""
        self.forks: list[tuple[int, list[weakref.ref[Any]]]] = []
        """For each fork its step, and weak references to its group and states."""

    def _template_of(self, client: Client) -> ChatTemplate | None:
        """The backend's template; without a backend one that marks turns, whatever the variables are."""
        return super()._template_of(client) if self._has_template else TURN_MARK_TEMPLATE

    def _notify_run_listeners(self) -> None:
        """Does nothing: listeners are for real runs."""

    def track_fork(self, fork: int, handles: Iterable[Any]) -> None:
        """Remembers the handles through which the branches of the fork at step `fork` can be read."""
        self.forks.append((fork, [weakref.ref(handle) for handle in handles]))

    def add_node(self, node: Node) -> int:
        """Appends a step and returns its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1


class TracedBranch(Branch):
    """A branch whose calls are recorded and not made. Its text may contain traced values."""

    run: TracedRun

    def __init__(self, run: TracedRun, session: AnySession | None = None, parent: Branch | None = None) -> None:
        super().__init__(run, session, parent)
        self.has_text: bool = isinstance(parent, TracedBranch) and parent.has_text

    def session(self) -> AnySession:
        if self._session is None and not self.run.ended and self._close_reason is None:
            self._session = cast("Session", _NullSession())
        return super().session()

    def write(self, text: str, *, control: bool = False) -> None:
        self.session()
        self.has_text = self.has_text or bool(text)
        if control:
            self._add_segment(TextSegment(text, control))
            return
        for piece in self.run.placeholders.split(text):
            self.append_value(piece) if isinstance(piece, TracedValue) else self._append_text(piece)

    def append_value(self, value: TracedValue) -> None:
        """Appends a traced value."""
        self.session()
        self.has_text = True
        for piece in value._parts or (value,):
            if isinstance(piece, str):
                self._append_text(piece)
                continue
            number = self._add_step(piece)
            self._add_segment(TracedResult(self.run, self.lane, piece, NodeOutput(number, None)))

    def add_call(self, expr: Expr) -> None:
        """Records a call. Raises InputError for what a run would refuse as well, such as an empty prompt."""
        self.session()
        gen = call_of(expr)
        assert isinstance(gen, Gen | Select | GenToolCall)
        n, value_format = 1, gen.value_format if isinstance(gen, Gen | Select) else None
        if not self.has_text:
            raise InputError(f"the prompt is empty: add text before {'select' if isinstance(gen, Select) else 'gen'}")
        if isinstance(gen, Gen | GenToolCall):
            _, n = gen.options.merged_over(self.run.defaults)
        if isinstance(gen, GenToolCall):
            value_format = tool_call_format(gen.tools, gen.choice, DEFAULT_CALL_SYNTAX, gen.value_format)
        result = TracedResult.of_call(self.run, self.lane, self._add_step(expr), gen.name, n, value_format)
        self._add_segment(result)
        if gen.name is not None:
            self.variables[gen.name] = result
        for name in variables_of(expr):
            if name != gen.name:
                self.variables[name] = TracedResult.of_call(self.run, self.lane, result.result.node, name, n)

    def set_variable(self, name: str, value: Any) -> None:
        """`s[name] = value`."""
        number = self._add_step(SetVariable, name, value)
        segment = (
            AssignedValue(value)
            if not isinstance(value, TracedValue)
            else TracedResult(self.run, self.lane, value, NodeOutput(number, name))
        )
        self.set(name, segment)

    def _copy_segment(self, segment: Segment) -> None:
        self._add_segment(segment)

    def _append_text(self, text: str) -> None:
        self._add_step(Text(text))
        self._add_segment(TextSegment(text))

    def _add_step(self, what: Any, *details: Any) -> int:
        node = (
            Append(self.lane, caller_location(), what, self.run.statement)
            if isinstance(what, Expr)
            else what(self.lane, caller_location(), *details)
        )
        return self.run.add_node(node)


def trace_expr(expr: Expr, branch: TracedBranch) -> None:
    """Records that `expr` is appended to `branch`; the counterpart of `interpreter.execute`."""
    branch.run.statement += 1
    _trace_part(expr, branch)


def _trace_part(expr: Expr, branch: TracedBranch) -> None:
    match expr:
        case TracedValue():
            value_format = expr._value_format
            if value_format is not None and value_format.type_name != "str":
                raise InputError(
                    f"only text and expressions can be appended, not {value_format.type_name}; write str(...)"
                )
            branch.append_value(expr)
        case Text():
            branch.write(expr.text)
        case Concat():
            for part in expr.parts:
                _trace_part(part, branch)
        case Gen() | Select() | GenToolCall() | SeparateReasoning() | GenWithCaptures():
            branch.add_call(expr)
        case SystemWithTools():
            branch._add_step(expr)
            branch.begin_turn("system")
            _trace_content(expr.content, branch)
            branch.end_turn("system")
        case RoleBegin():
            branch.begin_turn(expr.role)
            branch._add_step(expr)
        case RoleEnd():
            branch.end_turn(expr.role)
            branch._add_step(expr)
        case _:
            raise InputError(f"{type(expr).__name__} is not an expression that plait can run")


def _trace_content(content: Expr, branch: TracedBranch) -> None:
    """Writes the content of a system turn with tools. It is part of that turn's step, so it adds no steps."""
    if any(
        not isinstance(part, Text | TracedValue)
        for part in (content.parts if isinstance(content, Concat) else (content,))
    ):
        raise InputError("compile: a system turn that lists tools can contain text only")
    steps = len(branch.run.nodes)
    _trace_part(content, branch)
    del branch.run.nodes[steps:]


class _NullClient:
    """The methods of a client that a branch needs, without a runtime."""

    def __init__(self, template: ChatTemplate) -> None:
        self.tokenizer = RemoteTokenizer(template)

    def next_id(self) -> int:
        return 0

    def open_session(self, *, program: int | None = None) -> _NullSession:
        return _NullSession()


class _NullSession:
    """A session that checks its arguments and sends nothing."""

    def append(self, text: str, *, control: bool = False) -> None:
        """Does nothing: the branch keeps the text."""

    def fork(self, size: int) -> list[_NullSession]:
        check_fork_size(size)
        return [_NullSession() for _ in range(size)]

    def abort(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
