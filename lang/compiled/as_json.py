"""A straight-line graph as the request of `POST /v1/programs`; docs/programs-api.md says what that is.

The scopes of variables are followed as the server follows them, so that each value is named as it is known there.

Knows: steps, and the names of the request's fields. Must not know: HTTP, how a program runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from plait.constrained.specs import Choices, Ebnf, JsonSchema, Lark, Regex, Spec
from plait.lang.compiled.nodes import Adopt, Append, ForkInto, Join, Node, Read
from plait.lang.compiled.unknown import Argument, NotKnown, Result
from plait.lang.errors import CompileError, Problem, did_you_mean
from plait.lang.expressions import Gen, RoleBegin, RoleEnd, Select, Text
from plait.lang.options import Options
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.compiled.graph import Graph

_SAID = {"logprobs": "return_logprob", "top_logprobs": "top_logprobs_num", "timeout_s": "timeout"}
_JOINS = {"gather_variable": "gather", "concate_and_append": "append"}
Known = Any  # of a variable: where its value comes from (a Result or an Argument), or a list of such


class NotStraight(CompileError):
    """A step has no form in `POST /v1/programs`."""


def request_of(graph: Graph, arguments: Mapping[str, str]) -> dict[str, Any]:
    """The request. Raises CompileError (of type NotStraight) or, for `arguments` that do not fit, InputError."""
    for name, value in arguments.items():
        if name not in graph.parameters:
            raise InputError(f"graph of {graph.name!r}: no argument {name!r}{did_you_mean(name, graph.parameters)}")
        if not isinstance(value, str):
            raise InputError(f"graph of {graph.name!r}: an argument of a request is text, not {type(value).__name__}")
    request: dict[str, Any] = {"program": program_of(graph, arguments)}
    if defaults := _options(graph, graph.defaults, None):
        request["defaults"] = defaults
    return request


def program_of(graph: Graph, arguments: Mapping[str, str]) -> list[dict[str, Any]]:
    """The nodes of the request."""
    return _Writer(graph, arguments).program()


class _Strand:
    """One strand while its steps are written."""

    def __init__(self, scope: dict[str, Known], is_branch: bool) -> None:
        self.whole: list[dict[str, Any]] = []
        self.nodes = self.whole  # where the next step goes: a turn's content, or the whole
        self.scope = scope
        self.is_in_turn = False
        self.is_branch = is_branch
        self.forked: tuple[int, ...] = ()


class _Writer:
    def __init__(self, graph: Graph, arguments: Mapping[str, str]) -> None:
        self._graph, self._arguments = graph, arguments
        open_now: dict[str, Known] = {name: Argument(name) for name in graph.parameters if name not in arguments}
        self._strands = {0: _Strand(open_now, False)}

    def program(self) -> list[dict[str, Any]]:
        for number, node in enumerate(self._graph.nodes):
            strand = self._strands[node.strand]
            if strand.forked and not isinstance(node, Join | Adopt):
                self._refuse(node, "the program goes on between a fork and its join")
            self._step(number, node, strand)
        for strand in self._strands.values():
            if strand.is_in_turn:
                self._refuse(self._graph.nodes[-1], "a turn is still open at the end")
            if strand.forked:
                self._refuse(self._fork_of(strand), "the branches of a fork are never joined")
        if not any(isinstance(node, Append) and node.is_call for node in self._graph.nodes):
            self._refuse(None, "the program has no gen and no select")
        return self._strands[0].whole

    def _step(self, number: int, node: Node, strand: _Strand) -> None:
        match node:
            case Append(expr=Text(text)):
                strand.nodes.append({"text": text})
            case Append(expr=NotKnown() as value):
                strand.nodes.append(self._value(node, value, strand))
            case Append(expr=RoleBegin(role)):
                turn: dict[str, Any] = {"role": role, "content": []}
                strand.nodes.append(turn)
                strand.nodes, strand.is_in_turn = turn["content"], True
            case Append(expr=RoleEnd()):
                if not strand.is_in_turn:
                    self._refuse(node, "a turn ends in another branch than it begins in")
                strand.nodes, strand.is_in_turn = strand.whole, False
            case Append(expr=Gen() | Select()):
                strand.nodes.append(self._call(number, node, strand))
            case ForkInto():
                for branch in node.branches:
                    self._strands[branch] = _Strand(dict(strand.scope), True)
                strand.forked = node.branches
            case Join(winners=None) if node.branches == strand.forked:
                self._join(node, strand)
            case Read():
                self._refuse(node, f"the {node.what} of a state is read")
            case _:
                self._refuse(node, _WHY.get(type(node).__name__, "this step"))

    def _call(self, number: int, node: Append, strand: _Strand) -> dict[str, Any]:
        expr, n = node.expr, 1
        assert isinstance(expr, Gen | Select)
        if isinstance(expr, Gen):
            n = expr.options.n or self._graph.defaults.n or 1
        if expr.name is not None:
            if isinstance(strand.scope.get(expr.name), Argument):
                self._refuse(node, f"the variable {expr.name!r} has the name of an argument")
            whole = Result(number, expr.name)
            strand.scope[expr.name] = whole if n == 1 else [Result(number, expr.name, index) for index in range(n)]
        if isinstance(expr, Gen):
            return {"gen": self._gen(node, expr)}
        said: dict[str, Any] = {"choices": list(expr.choices), "choices_method": expr.method}
        if expr.timeout_s is not None:
            said["timeout"] = expr.timeout_s
        return {"select": said | ({} if expr.name is None else {"name": expr.name})}

    def _gen(self, node: Node, gen: Gen) -> dict[str, Any]:
        said: dict[str, Any] = {} if gen.name is None else {"name": gen.name}
        return said | _options(self._graph, gen.options, node) | _constraint(gen.constraint)

    def _value(self, node: Node, value: NotKnown, strand: _Strand) -> dict[str, Any]:
        """The variable, as it is known on this strand now, that has the value."""
        source = next(iter(value._sources)) if len(value._sources) == 1 and value._is_plain else None
        if isinstance(source, Argument) and source.name in self._arguments:
            return {"text": self._arguments[source.name]}
        for name, known in strand.scope.items():
            path = _path_to(source, known) if source is not None else None
            if path is not None:
                return {"var": name, **({"index": list(path)} if path else {})}
        why = "is not a variable there as it is" if source is not None else "is computed from other values"
        self._refuse(node, f"the value of {value._said} {why}")

    def _join(self, node: Join, strand: _Strand) -> None:
        branches = [self._strands[number] for number in node.branches]
        for branch in branches:
            if branch.is_in_turn or branch.forked:
                self._refuse(node, "a branch has an open turn or branches of its own")
        program = [branch.whole for branch in branches]
        strand.nodes.append({"fork": {"branches": program, "join": _JOINS[node.mode]}})
        if node.mode == "gather_variable":
            before, gathered = set(strand.scope), dict[str, Known]()
            for branch in branches:
                for name in branch.scope.keys() - before:
                    gathered.setdefault(name, []).append(branch.scope[name])
            strand.scope |= gathered
        strand.forked = ()

    def _fork_of(self, strand: _Strand) -> Node | None:
        forks = (node for node in self._graph.nodes if isinstance(node, ForkInto))
        return next((node for node in forks if node.branches == strand.forked), None)

    def _refuse(self, node: Node | None, why: str) -> NoReturn:
        place = self._graph.place if node is None else node.place
        raise NotStraight(self._graph.name, [Problem(f"no straight-line program: {why}", place)])


_WHY = {
    "Append": "tools and separate_reasoning belong to Python",
    "SetVariable": "a variable is set by the body",
    "BeginScope": "var_scope",
    "Join": "a race, or branches joined elsewhere than after their fork",
    "Adopt": "a branch is adopted",
    "RunTool": "a tool is run",
    "End": "a call or a text is ended early",
}


def _path_to(source: Any, known: Known) -> tuple[int, ...] | None:
    """Where in a variable the value is: () for all of it, None for nowhere."""
    if isinstance(known, list):
        for index, each in enumerate(known):
            path = _path_to(source, each)
            if path is not None:
                return (index, *path)
        return None
    return () if known == source else None


def _options(graph: Graph, options: Options, node: Node | None) -> dict[str, Any]:
    """Sampling fields under the names that the request has for them."""
    said: dict[str, Any] = {}
    for field, value in options.fields.items():
        if field == "prompt_logprobs_from":
            place = graph.place if node is None else node.place
            raise NotStraight(graph.name, [Problem("no straight-line program: logprob_start_len", place)])
        said[_SAID.get(field, field)] = list(value) if isinstance(value, tuple) else value
    return said if options.n is None else said | {"n": options.n}


def _constraint(spec: Spec | None) -> dict[str, Any]:
    match spec:
        case None:
            return {}
        case Regex(pattern):
            return {"regex": pattern}
        case Choices(choices):
            return {"choices": list(choices)}
        case Ebnf(grammar):
            return {"ebnf": grammar}
        case Lark(grammar):
            return {"lark": grammar}
        case JsonSchema() if spec == JsonSchema(spec.text):
            return {"json_schema": spec.text}
    return {"constraint": msgspec.to_builtins(spec)}
