"""Compiles a program's nodes to checked steps, so that errors of its form are found before it runs.

Every error names the node, as `program[2].gen.max_tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import UNSET

from plait.constrained.specs import Choices, Ebnf, GrammarError, JsonSchema, Lark, Regex, Spec
from plait.runtime.programs.sampling import gen_fields
from plait.runtime.programs.variables import gather_variables
from plait.runtime.sampling_params import NAMES
from plait.runtime.server.errors import invalid
from plait.runtime.server.generation.sampling_fields import checked_sampling_params
from plait.runtime.server.protocols.programs.steps import (
    ForkStep,
    GenStep,
    ProgramStep,
    SelectStep,
    TextNode,
    TurnBegin,
    TurnEnd,
    VariableStep,
)
from plait.runtime.server.protocols.programs.types import Fork, Gen, Node, ProgramRequest, ProgramSamplingFields, Select
from plait.runtime.server.protocols.shared import build_constraint

MAX_NODES = 4096
MAX_DEPTH = 16  # of forks and roles within each other
_KINDS = ("text", "var", "gen", "select", "role", "fork")
_CONSTRAINTS: dict[str, Any] = {
    "regex": Regex,
    "json_schema": JsonSchema,
    "ebnf": Ebnf,
    "lark": Lark,
    "choices": Choices,
}


@dataclass(frozen=True)
class CompiledProgram:
    """`max_calls`: the greatest number of calls that it can have in flight at once; see `call_count`."""

    steps: tuple[ProgramStep, ...]
    max_calls: int


def compile_program(body: ProgramRequest, max_branches: int) -> CompiledProgram:
    """Checks the program. `max_branches`: limit of parallel texts, samples included. Raises ApiError 400."""
    variables: dict[str, VariableCalls] = {
        name: None if isinstance(value, str) else [None] * len(value) for name, value in (body.variables or {}).items()
    }
    compiler = _Compiler(body.defaults or ProgramSamplingFields(), max_branches)
    compiler.check_defaults()
    main = compiler.calls.open_branch(variables)
    steps = compiler.steps(body.program, "program", main, in_role=False, depth=0)
    if not main.most:
        raise invalid("the program has no gen and no select", "program")
    return CompiledProgram(steps, main.most)


class _Compiler:
    def __init__(self, defaults: ProgramSamplingFields, max_branches: int) -> None:
        self._defaults, self._max_branches = defaults, max_branches
        self.calls = CallCounter()
        self._num_nodes, self._num_branches = 0, 1

    def check_defaults(self) -> None:
        """Checks the defaults alone, so that an error in them is named as theirs."""
        if self._defaults.min_tokens is not None and self._defaults.max_tokens is None:
            return  # each gen is checked with its own max_tokens
        checked_sampling_params("programs", path="defaults", **_sampling_fields(self._defaults))

    def steps(
        self, nodes: Sequence[Node], path: str, branch: BranchCalls, *, in_role: bool, depth: int
    ) -> tuple[ProgramStep, ...]:
        """The steps of `nodes`; adds the calls that they make and the variables that they set to `branch`."""
        self._num_nodes += len(nodes)
        if self._num_nodes > MAX_NODES:
            raise invalid(f"the program has more than {MAX_NODES} nodes", path)
        if depth > MAX_DEPTH:
            raise invalid(f"forks and roles are nested deeper than {MAX_DEPTH} levels", path)
        places = ((node, f"{path}[{index}]") for index, node in enumerate(nodes))
        return tuple(step for node, place in places for step in self._steps_of(node, place, branch, in_role, depth))

    def _steps_of(self, node: Node, path: str, branch: BranchCalls, in_role: bool, depth: int) -> Sequence[ProgramStep]:
        kind = _kind_of(node, path)
        if kind == "text":
            return (TextNode(str(node.text), path),)
        if kind == "var":
            return (self._variable(node, path, branch),)
        if kind == "gen":
            assert isinstance(node.gen, Gen)
            return (self._gen(node.gen, f"{path}.gen", branch),)
        if kind == "select":
            assert isinstance(node.select, Select)
            return (self._select(node.select, f"{path}.select", branch),)
        if kind == "role":
            if in_role:
                raise invalid(f"'{path}': a turn cannot begin inside another", f"{path}.role")
            role, content = str(node.role), node.content if isinstance(node.content, list) else []
            inner = self.steps(content, f"{path}.content", branch, in_role=True, depth=depth + 1)
            return (TurnBegin(role, path), *inner, TurnEnd(role, path))
        assert isinstance(node.fork, Fork)
        return (self._fork(node.fork, f"{path}.fork", branch, in_role, depth),)

    def _gen(self, gen: Gen, path: str, branch: BranchCalls) -> GenStep:
        n = gen.n or self._defaults.n or 1
        self._count_branches(n - 1, f"{path}.n")
        constraint, param = _constraint(gen, path)
        if gen.complete and constraint is None:
            raise invalid(f"'{path}.complete' needs a constraint, such as regex or json_schema", f"{path}.complete")
        fields = gen_fields(_sampling_fields(gen), _sampling_fields(self._defaults), constraint)
        sampling = checked_sampling_params("programs", path=path, complete=gen.complete, **fields)
        if gen.same_seed and sampling.seed is None:
            raise invalid(f"'{path}.same_seed' needs a seed", f"{path}.same_seed")
        same_seed = bool(self._defaults.same_seed if gen.same_seed is None else gen.same_seed)
        if gen.following_nodes and constraint is None:
            raise invalid(f"'{path}.following_nodes' needs a constraint", f"{path}.following_nodes")
        self.calls.add_call(branch, gen.name, n, sampling.max_rows)
        return GenStep(path, gen.name, sampling, same_seed, constraint, param, n, gen.following_nodes)

    def _select(self, select: Select, path: str, branch: BranchCalls) -> SelectStep:
        try:
            choices = Choices(tuple(select.choices)).choices
        except GrammarError as error:
            param = f"{path}.choices" if error.where is None else f"{path}.choices[{error.where}]"
            raise invalid(f"'{param}': {error.reason}", param, "invalid_constraint") from None
        timeout = self._defaults.timeout if select.timeout is None else select.timeout
        if select.seed is not None and select.choices_method != "exact":
            param = f"{path}.seed"
            raise invalid(f"'{param}' has no effect without the choices_method exact, since nothing is drawn", param)
        seed = getattr(self._defaults, NAMES["programs"]["seed"]) if select.seed is None else select.seed
        sampling = checked_sampling_params("programs", path=path, timeout_s=timeout, seed=seed)
        self.calls.add_call(branch, select.name)
        same_seed = bool(self._defaults.same_seed)
        return SelectStep(path, select.name, sampling, same_seed, choices, select.choices_method, timeout)

    def _variable(self, node: Node, path: str, branch: BranchCalls) -> VariableStep:
        name = str(node.var)
        if name not in branch.variables:
            raise invalid(f"'{path}.var': no variable '{name[:100]}' is set before this node", f"{path}.var")
        index = () if node.index is UNSET else tuple(node.index) if isinstance(node.index, list) else (node.index,)
        value = branch.variables[name]
        for item in index:
            if not isinstance(value, list) or not 0 <= int(item) < len(value):
                size = f"a list of {len(value)}" if isinstance(value, list) else "no list"
                raise invalid(f"'{path}.index': '{name[:100]}' is {size} there", f"{path}.index")
            value = value[int(item)]
        if isinstance(value, list):
            raise invalid(f"'{path}.var': '{name[:100]}' is a list; choose an item with index", f"{path}.var")
        self.calls.wait_for(branch, value)
        return VariableStep(f"{path}.var", name, tuple(int(item) for item in index))

    def _fork(self, fork: Fork, path: str, branch: BranchCalls, in_role: bool, depth: int) -> ForkStep:
        self._count_branches(len(fork.branches), f"{path}.branches")
        compiled, children = [], []
        for index, nodes in enumerate(fork.branches):
            children.append(child := self.calls.open_branch(branch.variables))
            place = f"{path}.branches[{index}]"
            compiled.append(self.steps(nodes, place, child, in_role=in_role, depth=depth + 1))
        self.calls.join(branch, children, fork.join)
        return ForkStep(path, tuple(compiled), fork.join)

    def _count_branches(self, more: int, param: str) -> None:
        self._num_branches += more
        if self._num_branches > self._max_branches:
            raise invalid(f"the program has more than {self._max_branches} branches and samples", param)


def _sampling_fields(options: ProgramSamplingFields) -> dict[str, Any]:
    """The sampling parameters that are set, by their fields in `SamplingParams`."""
    given = {field: getattr(options, name) for field, name in NAMES["programs"].items()}
    return {field: value for field, value in given.items() if value is not None}


def _kind_of(node: Node, path: str) -> str:
    kinds = [kind for kind in _KINDS if getattr(node, kind) is not UNSET]
    if len(kinds) != 1:
        listed = " and ".join(kinds) or "none of them"
        raise invalid(f"'{path}' must have exactly one of {', '.join(_KINDS)}; it has {listed}", path)
    if (node.content is not UNSET) != (kinds[0] == "role"):
        raise invalid(f"'{path}': a role must have content, and no other node can", f"{path}.content")
    if node.index is not UNSET and kinds[0] != "var":
        raise invalid(f"'{path}': index belongs to var", f"{path}.index")
    return kinds[0]


def _constraint(gen: Gen, path: str) -> tuple[Spec | None, str | None]:
    set_fields = [name for name in (*_CONSTRAINTS, "constraint") if getattr(gen, name) is not None]
    if len(set_fields) > 1:
        raise invalid(f"'{set_fields[0]}' and '{set_fields[1]}' cannot both hold", f"{path}.{set_fields[1]}")
    if not set_fields:
        return None, None
    name, param = set_fields[0], f"{path}.{set_fields[0]}"
    value = getattr(gen, name)
    return value if name == "constraint" else build_constraint(param, _CONSTRAINTS[name], value), param


# -- call count -----------------------------------------------------------------------------------
# Counts the calls that a program can have in flight at once, while its steps are compiled.
#
# A gen with `particles` or `exact` counts as the rows of a batch that it can occupy.
#
# A call is in flight while it runs or waits for a place in a batch. A session has at most one: its calls run in order.
# A program starts calls without waiting for earlier ones, so the calls of a fork's branches, and the samples of a gen,
# may still be in flight when later steps start theirs. They have ended for certain after a `var` of the last call of
# their session, and after a fork with "append", which waits for the texts of its branches.


class CallOfSession(NamedTuple):
    """A call, as the number of its session and its number among the calls of that session."""

    session: int
    call: int


VariableCalls: TypeAlias = "CallOfSession | list[VariableCalls] | None"  # None: a text of the request


@dataclass
class BranchCalls:
    """A branch while its steps are counted.

    variables: those that are set so far; a list has several values. active: the sessions that may have a call in
    flight, of this branch and its forks. most: the greatest number of them so far. ended: sessions of the branches
    around this one of which it has waited for the last call.
    """

    session: int
    variables: dict[str, VariableCalls]
    active: set[int] = field(default_factory=set)
    most: int = 0
    ended: set[int] = field(default_factory=set)


class CallCounter:
    """The greatest number of calls in flight, never too low, is `most` of the program's own branch at its end."""

    def __init__(self) -> None:
        self._num_sessions = 0
        self._num_calls: Counter[int] = Counter()  # of each session, so far
        self._num_rows: dict[int, int] = {}  # of each session: the most of one of its calls, so far

    def open_branch(self, variables: dict[str, VariableCalls]) -> BranchCalls:
        """Returns a branch with a session of its own."""
        return BranchCalls(self._new_session(), dict(variables))

    def _new_session(self) -> int:
        self._num_sessions += 1
        return self._num_sessions

    def add_call(self, branch: BranchCalls, name: str | None, num_samples: int = 1, num_rows: int = 1) -> None:
        """Counts a call, and sets variable `name`. `num_rows`: those of a batch that a sample can occupy."""
        sessions = [branch.session, *(self._new_session() for _ in range(num_samples - 1))]
        self._num_calls.update(sessions)
        self._num_rows |= {session: max(num_rows, self._num_rows.get(session, 1)) for session in sessions}
        branch.active.update(sessions)
        branch.most = max(branch.most, self._count_rows(branch.active))
        if name is not None:
            calls: list[VariableCalls] = [CallOfSession(session, self._num_calls[session]) for session in sessions]
            branch.variables[name] = calls if num_samples > 1 else calls[0]

    def _count_rows(self, sessions: set[int]) -> int:
        return sum(self._num_rows[session] for session in sessions)

    def wait_for(self, branch: BranchCalls, value: VariableCalls) -> None:
        """Counts that the branch waits for a text."""
        if isinstance(value, CallOfSession) and value.call == self._num_calls[value.session]:
            branch.active.discard(value.session)
            branch.ended.add(value.session)

    def join(self, branch: BranchCalls, children: Sequence[BranchCalls], mode: Literal["gather", "append"]) -> None:
        """Counts the branches of a fork side by side. Their calls start when those of `branch` before it have ended."""
        most_of_children = sum(child.most for child in children)
        branch.most = max(branch.most, self._count_rows(branch.active - {branch.session}) + most_of_children)
        if most_of_children:
            branch.active.discard(branch.session)
        for child in children:
            branch.active -= child.ended
            branch.ended |= child.ended
        for child in children:
            branch.active |= child.active - ({child.session} if mode == "append" else set())
        if mode == "gather":
            branch.variables |= gather_variables(branch.variables, [child.variables for child in children])
