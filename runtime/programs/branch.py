"""`BranchText`: one growing text of a program, with its segments, turns, variables, seeds and calls; free of I/O.

The language (`plait.lang.core.branch`) and `POST /v1/programs` add a session, and what waits for the calls. A fork
copies the three collections (not the text).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from plait.runtime.errors import InputError
from plait.runtime.programs.steps import RoleEndStep, Step, TextStep
from plait.runtime.seed_path import SeedPath

if TYPE_CHECKING:
    from plait.constrained.specs import Spec
    from plait.runtime.client.call import Call
    from plait.runtime.messages import SelectMethod
    from plait.runtime.programs.backend import BackendSession
    from plait.runtime.sampling_params import SamplingParams
    from plait.runtime.tokenizer.chat_template import ChatTemplate
    from plait.runtime.tokenizer.tokenizer import Tokenizer
    from plait.runtime.tokenizer.turn_texts import Role, Roles, TurnShape

S = TypeVar("S")
V = TypeVar("V")


class Turn(NamedTuple):
    """A finished turn; its content is `segments[start:stop]`. shape: what it is for the template beside a role and a
    text."""

    role: str
    start: int
    stop: int
    shape: TurnShape | None = None


class ForkPoint(NamedTuple):
    """What a branch had when it was forked: the names of its variables, and its numbers of segments and turns."""

    names: frozenset[str]
    num_segments: int
    num_turns: int


class BranchText(ABC, Generic[S, V]):
    """`segments`: the parts of the text, of type S. `variables`: name -> value, of type V."""

    def __init__(
        self, known_segment: Callable[[str, bool], S], parent: Self | None = None, seed_path: SeedPath | None = None
    ) -> None:
        """`known_segment(text, control)` makes the segment of a text that is known; `control` as in `write`. A fork of
        `parent`, with the place `seed_path`, begins with its text, turns and variables."""
        self._known_segment = known_segment
        self.segments: list[S] = [] if parent is None else parent.segments.copy()
        self.variables: dict[str, V] = {} if parent is None else parent.variables.copy()
        self.turns: list[Turn] = [] if parent is None else parent.turns.copy()
        self.open_turn: tuple[str, int] | None = None if parent is None else parent.open_turn  # role, first segment
        self.open_shape: TurnShape | None = None if parent is None else parent.open_shape  # of the open turn
        self.seed_path = seed_path or SeedPath()
        self._num_known_chars = 0  # of the next texts: those that the session has from the call before them

    @abstractmethod
    def session(self) -> BackendSession:
        """Returns the session to append to."""

    @abstractmethod
    def template(self) -> ChatTemplate:
        """Returns the model's chat template. Raises InputError if there is none."""

    @abstractmethod
    def child(self, session: Any, seed_path: SeedPath) -> Self:
        """Returns a branch that begins with this branch's text, turns and variables, on a fork of its session."""

    @abstractmethod
    def copy_segment(self, segment: S) -> None:
        """Appends the text of a segment of another branch."""

    def write(self, text: str, *, control: bool = False) -> None:
        """Appends known text. `control`: the text is the chat template's own, so control tokens in it count."""
        session, num_known = self.session(), min(self._num_known_chars, len(text))
        self._num_known_chars -= num_known
        session.append(text[num_known:], control=control)
        self.add_segment(self._known_segment(text, control))

    def expect_known(self, text: str) -> None:
        """Says that the session has the next text already, from the last call; `write` will write it."""
        self._num_known_chars = len(text)

    def add_segment(self, segment: S) -> None:
        """Appends a segment whose text the session has already, or gets from a call."""
        self.segments.append(segment)

    # -- turns ------------------------------------------------------------------------------------

    def begin_role(self, role: str, following: Sequence[Step]) -> Awaitable[None] | None:
        """Begins a turn; what is returned is to be waited for. `following`: the steps after this one."""
        self.begin_turn(role)
        return None

    def begin_turn(self, role: str, shape: TurnShape | None = None, without: str = "") -> None:
        """Writes the template's text before a turn, but not `without` at its end.

        Raises InputError inside an open turn, or without a template.
        """
        if self.open_turn is not None:
            article = "an" if role == "assistant" else "a"
            raise InputError(
                f"{article} {role} turn cannot begin inside the {self.open_turn[0]} turn; end that one first"
            )
        self.open_turn_with(role, self.turn_prefix(shape or role).removesuffix(without))
        self.open_shape = shape

    def open_turn_with(self, role: str, prefix: str) -> None:
        """Begins a turn with this text of the template."""
        self.write(prefix, control=True)
        self.open_turn = (role, len(self.segments))

    def end_turn(self, role: str) -> None:
        """Writes the template's text after a turn. Raises InputError unless the open turn has this role."""
        if self.open_turn is None or self.open_turn[0] != role:
            open_now = f"the open turn is {self.open_turn[0]}" if self.open_turn else "no turn is open"
            raise InputError(f"{role}_end() without its {role}_begin(): {open_now}")
        self.close_turn_with(self.turn_suffix(self.open_shape or role))

    def close_turn_with(self, suffix: str) -> None:
        """Ends the open turn with this text of the template."""
        assert self.open_turn is not None
        turn = Turn(*self.open_turn, len(self.segments), self.open_shape)
        self.open_turn = self.open_shape = None
        self.write(suffix, control=True)
        self.turns.append(turn)

    def turn_prefix(self, role: Role) -> str:
        """Returns the template's text before the next turn."""
        return self._around_turn(self.template().turn_prefix, role)

    def turn_suffix(self, role: Role) -> str:
        """Returns the template's text after the open turn."""
        return self._around_turn(self.template().turn_suffix, role)

    def _around_turn(self, text_of: Callable[[Roles, Role], str], role: Role) -> str:
        shapes = tuple(turn.shape or turn.role for turn in self.turns)
        try:
            return text_of(shapes, role)
        except InputError:
            if shapes != self.roles() or not isinstance(role, str):
                with suppress(InputError):  # a call without a result, say: as turns with a role and a text
                    return text_of(self.roles(), role if isinstance(role, str) else role.role)
            raise

    def roles(self) -> tuple[str, ...]:
        """Returns the roles of the finished turns."""
        return tuple(turn.role for turn in self.turns)

    # -- calls ------------------------------------------------------------------------------------

    def trailing_text(self, following: Iterable[Step], tokenizer: Tokenizer) -> str:
        """Returns the text that belongs to the constraint of the next gen; "" if none does. `following`: the steps
        after it, of which texts and the end of the open turn are known."""
        parts: list[tuple[str, bool]] = []
        for step in following:
            if isinstance(step, TextStep):
                parts.append((step.text, False))
                continue
            if isinstance(step, RoleEndStep) and self.open_turn is not None and self.open_turn[0] == step.role:
                parts.append((self.turn_suffix(step.role), True))
            break
        return trailing_text(parts, tokenizer)

    def start_gen(
        self, name: str | None, params: SamplingParams, constraint: Spec | None, n: int, trailing_text: str
    ) -> list[Call]:
        """Starts n calls after the text, which goes on with the first. `params`: with their seed, see `seed_path`."""
        session = self.session()
        samples = self.fork_session(n - 1) if n > 1 else ()
        calls: list[Call] = []
        try:
            for index, sample in enumerate((session, *samples)):
                sample.set_next_call_name(name)
                calls.append(sample.generate(params.for_sample(index), constraint, trailing_text))
        finally:
            for sample in samples:
                sample.close()  # takes effect after its call
        self.expect_known(trailing_text)
        return calls

    def start_select(
        self,
        name: str | None,
        choices: Sequence[str],
        method: SelectMethod,
        timeout_s: float | None,
        draw: SamplingParams | None = None,
        same_seed: bool = False,
    ) -> Call:
        """Starts a select after the text. `draw`, of the method "exact": has the seed, as `same_seed` says."""
        session, seed = self.session(), None
        if draw is not None:
            seed = self.seed_path.params_of_next_gen(draw, same_seed=same_seed).seed
        session.set_next_call_name(name)
        return session.select(choices, method, timeout_s, seed)

    # -- forks ------------------------------------------------------------------------------------

    def fork_session(self, size: int) -> Sequence[Any]:
        """Returns `size` sessions that continue the text."""
        return self.session().fork(size)

    def fork(self, size: int) -> list[Self]:
        """Returns `size` branches that begin with this branch's text, turns and variables."""
        sessions, seed_paths = self.fork_session(size), self.seed_path.fork(size)
        return list(map(self.child, sessions, seed_paths))

    def fork_point(self) -> ForkPoint:
        """Returns what a fork made now inherits."""
        return ForkPoint(frozenset(self.variables), len(self.segments), len(self.turns))

    def append_from_child(self, child: Self, point: ForkPoint) -> None:
        """Appends what `child` has after `point`. Raises InputError if a turn was opened or closed in between."""
        shift = len(self.segments) - point.num_segments
        if child.open_turn != self.open_turn:
            raise InputError("a branch opened or closed a turn that it did not finish; its text cannot be appended")
        for segment in child.segments[point.num_segments :]:
            self.copy_segment(segment)
        self.turns += [
            turn._replace(start=turn.start + shift, stop=turn.stop + shift) for turn in child.turns[point.num_turns :]
        ]


# -- trailing text --------------------------------------------------------------------------------
# The text after a constrained value that belongs to its constraint: a beginning of what is known to follow.

MAX_CHARS = 32
"""Characters of the text that belong to the constraint: enough to tell it from a longer value. The rest is appended."""
_WORD_END = re.compile(r"(?<=\S)(?=\s)")


def trailing_text(parts: list[tuple[str, bool]], tokenizer: Tokenizer) -> str:
    """Returns the beginning of the text of `parts`, (text, control) as in `Tokenizer.encode`, up to a control token.

    A longer text is cut at the end of a word, so that its tokens do not change.

    >>> following_text([(" legs and two wings, which most birds use to fly.", False)], tokenizer)   # doctest: +SKIP
    ' legs and two wings, which most'
    """
    text = ""
    for part, control in parts:
        plain = _before_control_token(part, tokenizer) if control else part
        text += plain
        if len(plain) < len(part) or len(text) > MAX_CHARS:
            break
    try:
        text.encode()
    except UnicodeEncodeError:
        return ""  # half of a surrogate pair: refused where the text is tokenized
    if len(text) <= MAX_CHARS:
        return text
    ends = [match.start() for match in _WORD_END.finditer(text[: MAX_CHARS + 1]) if match.start()]
    return text[: max(ends, default=MAX_CHARS)]


def _before_control_token(text: str, tokenizer: Tokenizer) -> str:
    places = [text.find(added) for added in tokenizer.added_texts if added]
    return text[: min((place for place in places if place >= 0), default=len(text))]
