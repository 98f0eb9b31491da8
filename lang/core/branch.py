"""`Branch`: one growing text of a program and its calls, and the session that mirrors it.

A fork continues on a forked session. States write and read through the methods here; `tracing.TracedBranch` has the
same ones and records what they are asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from plait.lang.core import calls
from plait.lang.core.expressions import CallExpr, Expr, GenToolCall, SystemWithTools
from plait.lang.core.results import AssignedValue, CallSegment, Samples, Segment, SegmentRange, TextSegment, ValueList
from plait.lang.core.tool_use import tool_calls
from plait.lang.usage import ProgramUsage, total
from plait.runtime.errors import InputError
from plait.runtime.programs.branch import BranchText, ForkPoint, Turn
from plait.runtime.programs.variables import gather_variables

if TYPE_CHECKING:
    from plait.lang.core.run import Run
    from plait.lang.states.fork_group import JoinMode
    from plait.runtime.client.deferred_session import DeferredSession
    from plait.runtime.programs.backend import BackendSession
    from plait.runtime.programs.steps import Step
    from plait.runtime.seed_path import SeedPath
    from plait.runtime.tokenizer.chat_template import ChatTemplate


class Branch(BranchText[Segment, Segment]):
    """The text of one state. Its session is opened when the first text is written."""

    def __init__(
        self,
        run: Run,
        session: BackendSession | None = None,
        parent: Branch | None = None,
        seed_path: SeedPath | None = None,
    ) -> None:
        super().__init__(TextSegment, parent, seed_path)
        self.branch_id: int = run.new_branch_id(None if parent is None else parent.branch_id)
        self.run = run
        self._session = session
        self._adapter: str = run.adapter if parent is None else parent._adapter  # of the session
        self._close_reason: str | None = None
        self._num_inherited_segments = len(self.segments)  # those of the parent
        self._children: weakref.WeakSet[Branch] = weakref.WeakSet()
        self._joined_calls: list[CallSegment] = []  # of branches that were joined; their states may be gone

    def own_call_segments(self) -> Sequence[CallSegment]:
        """Returns the calls made on this branch and on the forks of it, without those inherited from the parent."""
        own = _call_segments_in(self.segments[self._num_inherited_segments :])
        return [
            *own,
            *self._joined_calls,
            *(call_segment for child in list(self._children) for call_segment in child.own_call_segments()),
        ]

    def cancel(self, reason: str) -> None:
        """Ends this branch and its forks at once. Their missing values do not fail the program."""
        self.run.detach(self.own_call_segments())
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """Ends the session and the calls of this branch and of its forks at once."""
        self.run.ended_branches.setdefault(self.branch_id, reason)
        for child in list(self._children):
            child.abort(reason)
        for call_segment in (*_call_segments_in(self.segments[self._num_inherited_segments :]), *self._joined_calls):
            for sample in call_segment.siblings:
                sample.abort()
        if self._session is not None and self._close_reason is None:
            self.run.abort_session(self._session)
        self._close_reason = self._close_reason or reason

    def append(self, expr: Expr, following: Sequence[Step] = ()) -> None:
        """Runs an expression. `following`: what the same expression of the program appends next."""
        expr._run_on(self, following)

    def begin_call(self, expr: CallExpr, following: Sequence[Step] = ()) -> None:
        """Starts the call of an expression, and sets its variables. Raises ProgramError if it is refused at once."""
        self._use_adapter(self.run.adapter if expr.adapter is None else expr.adapter)
        expr._begin(self, following)

    def _use_adapter(self, name: str) -> None:
        """Continues on a session of the same text that the adapter `name` computes. Raises InputError."""
        if name == self._adapter:
            return
        session = self.session()
        (adapted,) = session.fork(1, name)
        self._session, self._adapter = self.run.register_session(adapted), name
        self.run.close(session)

    begin_own_call = calls.begin_own_call
    call_tool = tool_calls.call_tool
    call_tool_async = tool_calls.call_tool_async
    append_tool_result = tool_calls.append_tool_result

    def append_traced(self, expr: Expr) -> None:
        """Appends a value that is known at run time only: of a program that is compiled. Raises InputError."""
        raise InputError(f"{type(expr).__name__} is not an expression that plait can run")

    def session(self) -> BackendSession:
        """Returns the session to append to. Raises InputError once the branch is closed or the program has ended."""
        if self.run.ended or self._close_reason is not None:
            raise InputError(f"{self._close_reason or 'the program has ended'}; its state can be read, not extended")
        if self._session is None:
            self._session = self.run.open_session()
        return self._session

    def add(self, name: str | None, segment: Segment) -> None:
        """Adds a segment whose text is in the session already, or will come from a call, and sets variable `name` to
        it."""
        if name is not None:
            self.variables[name] = segment
        self.add_segment(segment)

    def set(self, name: str, value: Segment) -> None:
        """Sets variable `name`. The text does not change."""
        self.variables[name] = value
        self.run.notify()

    def assign(self, name: str, value: Any) -> None:
        """Sets variable `name` to any object. Raises InputError for an expression, which runs only when appended."""
        if isinstance(value, Expr):
            raise InputError(f"s[{name!r}] = ... stores a value and runs nothing: append the expression, s += ...")
        self.set(name, AssignedValue(value))

    def begin_scope(self, name: str) -> int:
        """Returns where the text of a scope begins, for `end_scope`."""
        return len(self.segments)

    def end_scope(self, name: str, start: int) -> None:
        """Sets variable `name` to the text from `start` on."""
        self.set(name, SegmentRange(self.segments[start:]))

    def add_segment(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.run.notify()

    # -- reading ----------------------------------------------------------------------------------

    def text_segments(self) -> list[Segment]:
        """Returns the list of segments, which grows while the body runs."""
        return self.segments

    def read_text(self) -> str:
        """Returns the whole text. Waits for its calls."""
        return "".join(segment.text() for segment in list(self.segments))

    def read_messages(self) -> list[dict[str, str]]:
        """Returns the turns, an open one included. Waits for their calls."""
        return [{"role": role, "content": content.text()} for role, content in self.messages()]

    def finished_messages(self) -> list[dict[str, str]]:
        """Returns the turns without the texts of calls that failed or still run. Does not wait."""
        found = []
        for role, turn in self.messages():
            ended = [part for part in turn.parts if all(call.usage is not None for call in part.calls())]
            found.append({"role": role, "content": "".join(part.text() for part in ended)})
        return found

    def read_usage(self) -> ProgramUsage:
        """Returns the token counts of all calls of the program so far. Waits for them."""
        return total(self.run.call_segments())

    def usage_so_far(self) -> ProgramUsage:
        """Returns the token counts of the calls of the program that have ended. Does not wait."""
        return total(call_segment for call_segment in self.run.call_segments() if call_segment.ended_s)

    def abort_variable(self, name: str | None, variable: Segment | None) -> None:
        """Ends the call of a variable; without one, all calls of the program."""
        self.run.abort() if variable is None else variable.abort()

    # -- turns ------------------------------------------------------------------------------------

    def begin_role(self, role: str, following: Sequence[Step]) -> None:
        """Begins a turn. `following` as in `append`: a call of a tool can begin the turn in another way than a text."""
        if following and isinstance(following[0], GenToolCall) and following[0].choice != "none":
            from plait.lang.core.tool_use.tool_turns import (
                begin_call_turn,  # lazy, here and below: few programs have tools
            )

            begin_call_turn(self, role)
        else:
            self.begin_turn(role)

    def write_system_turn(self, turn: SystemWithTools) -> None:
        """Writes a system turn that lists tools."""
        from plait.lang.core.tool_use.tool_turns import write_system_turn

        write_system_turn(self, turn)

    @property
    def in_turn(self) -> bool:
        """Whether a turn is open."""
        return self.open_turn is not None

    def messages(self) -> list[tuple[str, SegmentRange]]:
        """Returns (role, content) of each turn. The last turn may still be open."""
        turns = list(self.turns)
        if self.open_turn is not None:
            turns.append(Turn(*self.open_turn, len(self.segments)))
        return [(turn.role, SegmentRange(self.segments[turn.start : turn.stop])) for turn in turns]

    def template(self) -> ChatTemplate:
        """Returns the model's chat template. Raises InputError if there is none."""
        template = self.run.chat_template
        if template is None:
            raise InputError(
                "this model has no chat template, so it has no system, user or assistant turns; append plain "
                "text, or use an instruction-tuned model"
            )
        return template

    # -- forks ------------------------------------------------------------------------------------

    def child(self, session: BackendSession, seed_path: SeedPath) -> Self:
        child = type(self)(self.run, self.run.register_session(session), self, seed_path)
        self._children.add(child)
        return child

    def join(self, children: Sequence[Branch], mode: JoinMode, point: ForkPoint, winners: int | None = None) -> None:
        """Brings the results of forks made at `point` here. Their calls may still run. `winners`: of a race that is
        compiled, how many of the children these are."""
        for child in children:
            self.take_calls_of(child)
        if mode == "gather_variable":
            for name, variables in gather_variables(point.names, [child.variables for child in children]).items():
                self.set(name, ValueList(variables))
        else:
            for child in children:
                self.append_from_child(child, point)

    def trace_race(self, forks: Any, first: int) -> Any:
        """Returns the winners while the program is compiled, where no branch computes anything; otherwise None."""
        return None

    def begin_adopt(self, winner: Branch, children: Sequence[Branch]) -> None:
        """Ends all children but `winner`, as which this branch will continue; see `take_over`."""
        for child in children:
            if child is not winner:
                child.cancel("another branch was adopted")

    def take_over(self, winner: Branch, point: ForkPoint) -> None:
        """Appends the text of an adopted fork, and takes over its variables."""
        self.append_from_child(winner, point)
        self.variables.update(winner.variables)

    def take_calls_of(self, joined: Branch) -> None:
        """Makes the calls of a joined branch calls of this one: whoever waits for or ends this branch does so with
        them."""
        self._joined_calls += joined.own_call_segments()
        self._children.discard(joined)

    def copy_segment(self, segment: Segment) -> None:
        """Appends the text of a segment of another branch, now or when it is known: its calls may still run."""
        calls = segment.calls()
        if all(call.usage is not None for call in calls):  # they have ended without an error
            for text, control in segment.marked_parts():
                self.write(text, control=control)
            return
        self.defer_session().append_later(calls, segment.marked_parts)
        self.add_segment(SegmentRange([segment]))

    def defer_session(self) -> DeferredSession:
        """Returns the session, to which text can be appended that calls still generate."""
        self._session = deferred = self.run.deferred(self.session())
        return deferred

    def close(self, reason: str) -> None:
        """Releases the session once its calls are done. The text stays readable. Idempotent."""
        if self._close_reason is None:
            self._close_reason = reason
            if self._session is not None:
                self.run.close(self._session)

    def call_segments(self) -> Sequence[CallSegment]:
        """Returns the calls whose text is part of this branch's text."""
        return _call_segments_in(self.segments)

    def awaited_call_segments(self) -> Sequence[CallSegment]:
        """Returns the calls of this branch's text, and those of the branches that were joined to it."""
        return [*self.call_segments(), *self._joined_calls]

    def __del__(self) -> None:
        if self._session is not None and self._close_reason is None:
            self.run.close_later(self._session)


def _call_segments_in(segments: Sequence[Segment]) -> list[CallSegment]:
    call_segments: list[CallSegment] = []
    for segment in segments:
        if isinstance(segment, CallSegment):
            call_segments.append(segment)
        elif isinstance(segment, Samples):
            call_segments.extend(segment.call_segments)
    return call_segments
