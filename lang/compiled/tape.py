"""What is written while a body runs with no model: strands whose text may hold unknown values, and every step taken.

Knows: strands, sessions' rules, nodes. Must not know: handles, who runs the body, how a graph is shown.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from plait.lang.answers import Readable, Written
from plait.lang.backends.chat import TEMPLATE
from plait.lang.backends.remote import RemoteTokenizer
from plait.lang.compat.reasoning import SUFFIX, Reasoned
from plait.lang.compiled.later import Later, SetValue
from plait.lang.compiled.nodes import Append, Node, SetVariable
from plait.lang.compiled.unknown import Marks, NotKnown, Result
from plait.lang.expressions import (
    Concat,
    Expr,
    Gen,
    GenCall,
    RoleBegin,
    RoleEnd,
    Select,
    SystemWithTools,
    Text,
)
from plait.lang.options import Options
from plait.lang.place import here
from plait.lang.run import Run
from plait.lang.strand import Strand
from plait.lang.tools.generating import call_form
from plait.lang.tools.wording import PLAIN
from plait.runtime.errors import InputError
from plait.runtime.messages import MAX_FORK_CHILDREN

if TYPE_CHECKING:
    from plait.runtime.client.client import Client
    from plait.runtime.client.session import Session
    from plait.runtime.tokenizer.chat_template import ChatTemplate


class Tape(Run):
    """The steps of one body, in order. A Run that asks nothing of anyone."""

    def __init__(self, program: str, defaults: Options, template: ChatTemplate | None) -> None:
        super().__init__(program, cast("Client", _NoClient(template or TEMPLATE)), defaults)
        self.marks = Marks(program)
        self.nodes: list[Node] = []
        self.read: set[int] = set()
        """The strands of which something was read."""
        self.forks: list[tuple[int, list[weakref.ref[Any]]]] = []
        """The step of each fork, and its group and states, which are gone when nobody holds them."""

    def _announce(self) -> None:
        """Nothing runs."""

    def watch(self, fork: int, handles: Iterable[Any]) -> None:
        """Notes who can still read the branches of the fork at step `fork`."""
        self.forks.append((fork, [weakref.ref(handle) for handle in handles]))

    def add(self, node: Node) -> int:  # type: ignore[override]  # there are no calls to count
        """The number of one more step."""
        self.nodes.append(node)
        return len(self.nodes) - 1


class TapeStrand(Strand):
    """A strand whose calls are never made."""

    run: Tape

    def __init__(self, run: Tape, session: Session | None = None, parent: Strand | None = None) -> None:
        super().__init__(run, session, parent)
        self.has_text: bool = isinstance(parent, TapeStrand) and parent.has_text

    def session(self) -> Session:
        if self._session is None and not self.run.ended and self._closed_by is None:
            self._session = cast("Session", _NoSession())
        return super().session()

    def write(self, text: str, *, control: bool = False) -> None:
        self.session()
        self.has_text = self.has_text or bool(text)
        if control:
            self._show(Written(text, control))
            return
        for piece in self.run.marks.split(text):
            self.append_value(piece) if isinstance(piece, NotKnown) else self._append_text(piece)

    def append_value(self, value: NotKnown) -> None:
        """Adds what only a run knows."""
        self.session()
        self.has_text = True
        for piece in value._parts or (value,):
            if isinstance(piece, str):
                self._append_text(piece)
                continue
            number = self._note(piece)
            self._show(Later(self.run, self.lane, piece, Result(number, None)))

    def ask(self, expr: Gen | Select | GenCall | Reasoned) -> None:
        """Adds a call."""
        self.session()
        gen = expr.gen if isinstance(expr, Reasoned) else expr
        n, form = 1, gen.form if isinstance(gen, Gen) else None
        if not self.has_text:
            raise InputError(f"the prompt is empty: add text before {'select' if isinstance(gen, Select) else 'gen'}")
        if isinstance(gen, Gen | GenCall):
            _, n = gen.options.over(self.run.defaults)
        if isinstance(gen, GenCall):
            form = call_form(gen.tools, gen.choice, PLAIN)
        answer = Later.of_call(self.run, self.lane, self._note(expr), gen.name, n, form)
        self._show(answer)
        if gen.name is None:
            return
        self.variables[gen.name] = answer
        if isinstance(expr, Reasoned):
            thought = f"{gen.name}{SUFFIX}"
            self.variables[thought] = Later.of_call(self.run, self.lane, answer.result.node, thought, n)

    def set_known(self, name: str, value: Any) -> None:
        """`s[name] = value`."""
        number = self._note(SetVariable, name, value)
        readable = (
            SetValue(value)
            if not isinstance(value, NotKnown)
            else Later(self.run, self.lane, value, Result(number, name))
        )
        self.set(name, readable)

    def _write_again(self, segment: Readable) -> None:
        self._show(segment)

    def _append_text(self, text: str) -> None:
        self._note(Text(text))
        self._show(Written(text))

    def _note(self, what: Any, *details: Any) -> int:
        node = Append(self.lane, here(), what) if isinstance(what, Expr) else what(self.lane, here(), *details)
        return self.run.add(node)


def record(expr: Expr, strand: TapeStrand) -> None:
    """Appends `expr` to `strand`, as `execute` would."""
    match expr:
        case NotKnown():
            form = expr._form
            if form is not None and form.said != "str":
                raise InputError(f"only text and expressions can be appended, not {form.said}; write str(...)")
            strand.append_value(expr)
        case Text():
            strand.write(expr.text)
        case Concat():
            for part in expr.parts:
                record(part, strand)
        case Gen() | Select() | GenCall() | Reasoned():
            strand.ask(expr)
        case SystemWithTools():
            strand._note(expr)
            strand.begin_turn("system")
            _record_content(expr.content, strand)
            strand.end_turn("system")
        case RoleBegin():
            strand.begin_turn(expr.role)
            strand._note(expr)
        case RoleEnd():
            strand.end_turn(expr.role)
            strand._note(expr)
        case _:
            raise InputError(f"{type(expr).__name__} is no expression that plait can run")


def _record_content(content: Expr, strand: TapeStrand) -> None:
    """The words of a system turn with tools belong to its one step."""
    if any(
        not isinstance(part, Text | NotKnown) for part in (content.parts if isinstance(content, Concat) else (content,))
    ):
        raise InputError("compile: a system turn that lists tools can hold text only")
    steps = len(strand.run.nodes)
    record(content, strand)
    del strand.run.nodes[steps:]


class _NoClient:
    """What a strand asks a client for, without one."""

    def __init__(self, template: ChatTemplate) -> None:
        self.tokenizer = RemoteTokenizer(template)

    def next_id(self) -> int:
        return 0

    def open_session(self, *, program: int | None = None) -> _NoSession:
        return _NoSession()


class _NoSession:
    """A session's rules, and nothing behind them."""

    def append(self, text: str, *, control: bool = False) -> None:
        """The strand keeps it."""

    def fork(self, size: int) -> list[_NoSession]:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_FORK_CHILDREN:
            raise InputError(f"fork takes a number of branches from 1 to {MAX_FORK_CHILDREN}, not {size!r}")
        return [_NoSession() for _ in range(size)]

    def abort(self) -> None:
        """Nothing goes on."""

    def close(self) -> None:
        """Nothing goes on."""
