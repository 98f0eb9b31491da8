"""A program's nodes as checked steps: after this nothing about the program's form can be wrong.

Every error names the node, as `program[2].gen.max_tokens`.

Knows: nodes, scopes of variables, limits. Must not know: sessions, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from msgspec import UNSET

from plait.constrained.specs import Choices, Ebnf, GrammarError, JsonSchema, Lark, Regex, Spec
from plait.runtime.messages import SelectMethod
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.errors import invalid
from plait.runtime.server.generation.sampling_fields import sampling_params_from_fields
from plait.runtime.server.protocols.programs.types import Fork, Gen, Node, ProgramRequest, ProgramSamplingFields, Select

MAX_NODES = 4096
MAX_DEPTH = 16  # of forks and roles within each other
_KINDS = ("text", "var", "gen", "select", "role", "fork")
_PROTOCOL_NAMES = {"logprobs": "return_logprob", "top_logprobs": "top_logprobs_num", "timeout_s": "timeout"}
_FORMS: dict[str, Any] = {"regex": Regex, "json_schema": JsonSchema, "ebnf": Ebnf, "lark": Lark}

ListShape: TypeAlias = "list[ListShape] | None"  # what a variable is: a text (None), or a list of such
Scope: TypeAlias = dict[str, ListShape]


@dataclass(frozen=True)
class TextStep:
    text: str


@dataclass(frozen=True)
class VariableStep:
    name: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class GenStep:
    path: str
    name: str | None
    sampling: SamplingParams
    constraint: Spec | None
    constraint_param: str | None
    n: int


@dataclass(frozen=True)
class SelectStep:
    path: str
    name: str | None
    choices: tuple[str, ...]
    method: SelectMethod
    timeout_s: float | None


@dataclass(frozen=True)
class RoleStep:
    path: str
    role: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class ForkStep:
    path: str
    branches: tuple[tuple[Step, ...], ...]
    join: Literal["gather", "append"]


Step: TypeAlias = TextStep | VariableStep | GenStep | SelectStep | RoleStep | ForkStep


def compile_program(body: ProgramRequest, max_branches: int) -> tuple[Step, ...]:
    """Raises ApiError. `max_branches`: how many texts the program may have side by side, samples included."""
    scope: Scope = {
        name: None if isinstance(value, str) else [None] * len(value) for name, value in (body.variables or {}).items()
    }
    compiler = _Compiler(body.defaults or ProgramSamplingFields(), max_branches)
    compiler.check_defaults()
    steps = compiler.steps(body.program, "program", scope, in_role=False, depth=0)
    if not compiler.num_calls:
        raise invalid("the program has no gen and no select", "program")
    return steps


class _Compiler:
    def __init__(self, defaults: ProgramSamplingFields, max_branches: int) -> None:
        self._defaults, self._max_branches = defaults, max_branches
        self._num_nodes = self.num_calls = 0
        self._num_branches = 1

    def check_defaults(self) -> None:
        """The defaults alone, so that what is wrong in them is found there."""
        if self._defaults.min_tokens is not None and self._defaults.max_tokens is None:
            return  # each gen is checked with its own max_tokens
        self._sampling(Gen(), "defaults")

    def steps(self, nodes: Sequence[Node], at: str, scope: Scope, *, in_role: bool, depth: int) -> tuple[Step, ...]:
        """The steps of `nodes`; `scope` learns the variables that they set."""
        self._num_nodes += len(nodes)
        if self._num_nodes > MAX_NODES:
            raise invalid(f"the program has more than {MAX_NODES} nodes", at)
        if depth > MAX_DEPTH:
            raise invalid(f"forks and roles are nested deeper than {MAX_DEPTH} levels", at)
        return tuple(self._step(node, f"{at}[{i}]", scope, in_role, depth) for i, node in enumerate(nodes))

    def _step(self, node: Node, at: str, scope: Scope, in_role: bool, depth: int) -> Step:
        kind = _kind_of(node, at)
        if kind == "text":
            return TextStep(str(node.text))
        if kind == "var":
            return _variable(node, at, scope)
        if kind == "gen":
            assert isinstance(node.gen, Gen)
            return self._gen(node.gen, f"{at}.gen", scope)
        if kind == "select":
            assert isinstance(node.select, Select)
            return self._select(node.select, f"{at}.select", scope)
        if kind == "role":
            if in_role:
                raise invalid(f"'{at}': a turn cannot begin inside another", f"{at}.role")
            content = node.content if isinstance(node.content, list) else []
            inner = self.steps(content, f"{at}.content", scope, in_role=True, depth=depth + 1)
            return RoleStep(at, str(node.role), inner)
        assert isinstance(node.fork, Fork)
        return self._fork(node.fork, f"{at}.fork", scope, in_role, depth)

    def _gen(self, gen: Gen, at: str, scope: Scope) -> GenStep:
        self.num_calls += 1
        n = gen.n or self._defaults.n or 1
        self._count_branches(n - 1, f"{at}.n")
        constraint, param = _constraint(gen, at)
        if gen.complete and constraint is None:
            raise invalid(f"'{at}.complete' needs a constraint, such as regex or json_schema", f"{at}.complete")
        if gen.name is not None:
            scope[gen.name] = None if n == 1 else [None] * n
        return GenStep(at, gen.name, self._sampling(gen, at), constraint, param, n)

    def _sampling(self, gen: Gen, at: str) -> SamplingParams:
        """The gen's own words, then the defaults'."""

        def option(name: str) -> Any:
            value = getattr(gen, name)
            return getattr(self._defaults, name) if value is None else value

        top = option("top_logprobs_num")
        return sampling_params_from_fields(
            _PROTOCOL_NAMES,
            at,
            **{
                name: option(name)
                for name in ProgramSamplingFields.__struct_fields__
                if name in SamplingParams.__struct_fields__
            },
            logprobs=option("return_logprob"),
            top_logprobs=top,
            timeout_s=option("timeout"),
            complete=gen.complete,
        )

    def _select(self, select: Select, at: str, scope: Scope) -> SelectStep:
        self.num_calls += 1
        try:
            choices = Choices(tuple(select.choices)).choices
        except GrammarError as error:
            where = f"{at}.choices" if error.where is None else f"{at}.choices[{error.where}]"
            raise invalid(f"'{where}': {error.reason}", where, "invalid_constraint") from None
        timeout = self._defaults.timeout if select.timeout is None else select.timeout
        sampling_params_from_fields(_PROTOCOL_NAMES, at, timeout_s=timeout)
        if select.name is not None:
            scope[select.name] = None
        return SelectStep(at, select.name, choices, select.choices_method, timeout)

    def _fork(self, fork: Fork, at: str, scope: Scope, in_role: bool, depth: int) -> ForkStep:
        self._count_branches(len(fork.branches), f"{at}.branches")
        compiled, scopes = [], []
        for index, branch in enumerate(fork.branches):
            own = dict(scope)
            path = f"{at}.branches[{index}]"
            compiled.append(self.steps(branch, path, own, in_role=in_role, depth=depth + 1))
            scopes.append(own)
        if fork.join == "gather":
            scope.update(gather_variables(scope, scopes))
        return ForkStep(at, tuple(compiled), fork.join)

    def _count_branches(self, more: int, param: str) -> None:
        self._num_branches += more
        if self._num_branches > self._max_branches:
            raise invalid(f"the program has more than {self._max_branches} branches and samples", param)


def gather_variables(before: Mapping[str, Any], branches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each name that is new in a branch -> the branches' values, in order.

    >>> gathered({"a": 1}, [{"a": 2, "b": 3}, {"a": 1, "b": 4, "c": 5}])
    {'b': [3, 4], 'c': [5]}
    """
    found: dict[str, Any] = {}
    for branch in branches:
        for name, value in branch.items():
            if name not in before:
                found.setdefault(name, []).append(value)
    return found


def _kind_of(node: Node, at: str) -> str:
    given = [kind for kind in _KINDS if getattr(node, kind) is not UNSET]
    if len(given) != 1:
        what = " and ".join(given) or "none of them"
        raise invalid(f"'{at}' must have exactly one of {', '.join(_KINDS)}; it has {what}", at)
    if (node.content is not UNSET) != (given[0] == "role"):
        raise invalid(f"'{at}': content is what a role has, and must have", f"{at}.content")
    if node.index is not UNSET and given[0] != "var":
        raise invalid(f"'{at}': index belongs to var", f"{at}.index")
    return given[0]


def _variable(node: Node, at: str, scope: Scope) -> VariableStep:
    name = str(node.var)
    if name not in scope:
        raise invalid(f"'{at}.var': no variable '{name[:100]}' is set before this node", f"{at}.var")
    given = node.index
    index = () if given is UNSET else tuple(given) if isinstance(given, list) else (given,)
    extent = scope[name]
    for each in index:
        if extent is None or not 0 <= int(each) < len(extent):
            size = "no list" if extent is None else f"a list of {len(extent)}"
            raise invalid(f"'{at}.index': '{name[:100]}' is {size} there", f"{at}.index")
        extent = extent[int(each)]
    if extent is not None:
        raise invalid(f"'{at}.var': '{name[:100]}' is a list; say which item with index", f"{at}.var")
    return VariableStep(name, tuple(int(each) for each in index))


def _constraint(gen: Gen, at: str) -> tuple[Spec | None, str | None]:
    names = ("regex", "json_schema", "ebnf", "lark", "choices", "constraint")
    given = [name for name in names if getattr(gen, name) is not None]
    if len(given) > 1:
        raise invalid(f"'{given[0]}' and '{given[1]}' cannot both hold", f"{at}.{given[1]}")
    if not given:
        return None, None
    name, param = given[0], f"{at}.{given[0]}"
    value = getattr(gen, name)
    if name == "constraint":
        return value, param
    try:
        return (Choices(tuple(value)) if name == "choices" else _FORMS[name](value)), param
    except GrammarError as error:
        raise invalid(f"'{param}': {error}", param, "invalid_constraint") from None
