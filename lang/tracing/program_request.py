"""Converts a straight-line graph to the request body of `POST /v1/programs` (see docs/programs-api.md).

The scopes of variables are tracked as the server tracks them, so that each value is referred to by its name there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from plait.constrained.specs import Spec
from plait.lang.argument_checks import keyword_of
from plait.lang.core.expressions import Gen, RoleBegin, RoleEnd, Select, Text
from plait.lang.errors import CompileError, Problem
from plait.lang.sampling_options import Options
from plait.lang.tracing.nodes import Act, Adopt, Append, ForkInto, Join, Node, following_steps
from plait.lang.tracing.traced_value import Argument, NodeOutput, TracedValue
from plait.runtime.errors import InputError
from plait.runtime.programs.variables import gather_variables
from plait.runtime.sampling_params import NAMES, name_in
from plait.runtime.similar_names import did_you_mean

if TYPE_CHECKING:
    from plait.lang.tracing.graph import Graph

_JOINS = {"gather_variable": "gather", "concate_and_append": "append"}
VariableSource = Any  # where the value of a variable comes from: a NodeOutput or an Argument, or a list of them


class UnsupportedControlFlow(CompileError):
    """A step of the graph cannot be expressed in `POST /v1/programs`."""


def build_request(graph: Graph, arguments: Mapping[str, str]) -> dict[str, Any]:
    """Returns the request body. Raises UnsupportedControlFlow, or InputError for `arguments` that do not fit."""
    for name, value in arguments.items():
        if name not in graph.parameters:
            raise InputError(f"graph of {graph.name!r}: no argument {name!r}{did_you_mean(name, graph.parameters)}")
        if not isinstance(value, str):
            raise InputError(f"graph of {graph.name!r}: arguments of a request are text, not {type(value).__name__}")
    request: dict[str, Any] = {"program": build_program(graph, arguments)}
    if defaults := _options(graph, graph.defaults, None):
        request["defaults"] = defaults
    if graph.defaults.adapter:
        request["model"] = graph.defaults.adapter
    if graph.defaults.template_variables:
        request["chat_template_kwargs"] = dict(graph.defaults.template_variables)
    return request


def build_program(graph: Graph, arguments: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the nodes of the request. Raises UnsupportedControlFlow."""
    return _Writer(graph, arguments).program()


class _BranchWriter:
    """One branch while its steps are written."""

    def __init__(self, scope: dict[str, VariableSource]) -> None:
        self.root_nodes: list[dict[str, Any]] = []
        self.nodes = self.root_nodes  # the list that gets the next node: the content of the open turn, or the root
        self.scope = scope
        self.is_in_turn = False
        self.forked: tuple[int, ...] = ()  # the branches of a fork that is not joined yet


class _Writer:
    def __init__(self, graph: Graph, arguments: Mapping[str, str]) -> None:
        self._graph, self._arguments = graph, arguments
        parameters: dict[str, VariableSource] = {
            name: Argument(name) for name in graph.parameters if name not in arguments
        }
        self._writers = {0: _BranchWriter(parameters)}

    def program(self) -> list[dict[str, Any]]:
        for number, node in enumerate(self._graph.nodes):
            writer = self._writers[node.branch_id]
            if writer.forked and not isinstance(node, Join | Adopt):
                self._refuse(node, "the program has a step between a fork and its join")
            self._step(number, node, writer)
        for writer in self._writers.values():
            if writer.is_in_turn:
                self._refuse(self._graph.nodes[-1], "a turn is not closed")
            if writer.forked:
                self._refuse(self._fork_of(writer), "the branches of a fork are never joined")
        if not any(isinstance(node, Append) and node.is_call for node in self._graph.nodes):
            self._refuse(None, "the program has neither gen nor select")
        return self._writers[0].root_nodes

    def _step(self, number: int, node: Node, writer: _BranchWriter) -> None:
        match node:
            case Append(expr=Text(text)):
                writer.nodes.append({"text": text})
            case Append(expr=TracedValue() as value):
                writer.nodes.append(self._value(node, value, writer))
            case Append(expr=RoleBegin(role)):
                turn: dict[str, Any] = {"role": role, "content": []}
                writer.nodes.append(turn)
                writer.nodes, writer.is_in_turn = turn["content"], True
            case Append(expr=RoleEnd()):
                if not writer.is_in_turn:
                    self._refuse(node, "a turn begins in one branch and ends in another")
                writer.nodes, writer.is_in_turn = writer.root_nodes, False
            case Append(expr=Gen() | Select()):
                writer.nodes.append(self._call(number, node, writer))
            case ForkInto():
                for branch in node.branches:
                    self._writers[branch] = _BranchWriter(dict(writer.scope))
                writer.forked = node.branches
            case Join(winners=None) if node.branches == writer.forked:
                self._join(node, writer)
            case Act(action=action, name=name):
                self._refuse(node, _REASON_OF_ACTION[action].format(name))
            case _:
                self._refuse(node, _REASON_OF_NODE[type(node).__name__])

    def _call(self, number: int, node: Append, writer: _BranchWriter) -> dict[str, Any]:
        expr, n = node.expr, 1
        assert isinstance(expr, Gen | Select)
        if expr.adapter is not None:
            self._refuse(node, "an adapter is the model of the whole request")
        if isinstance(expr, Gen):
            n = expr.options.n or self._graph.defaults.n or 1
        if expr.name is not None:
            if isinstance(writer.scope.get(expr.name), Argument):
                self._refuse(node, f"the variable {expr.name!r} has the name of an argument")
            output = NodeOutput(number, expr.name)
            writer.scope[expr.name] = output if n == 1 else [NodeOutput(number, expr.name, index) for index in range(n)]
        if isinstance(expr, Gen):
            gen = self._gen(node, expr)
            if expr.constraint is not None:
                gen["following_nodes"] = len(following_steps(self._graph.nodes, number))
            return {"gen": gen}
        select: dict[str, Any] = {"choices": list(expr.choices), "choices_method": expr.method}
        if expr.timeout_s is not None:
            select["timeout"] = expr.timeout_s
        if (seed := expr.options.fields.get("seed")) is not None:
            select["seed"] = seed
        return {"select": select | ({} if expr.name is None else {"name": expr.name})}

    def _gen(self, node: Node, gen: Gen) -> dict[str, Any]:
        if gen.retries:
            self._refuse(node, "retries need the validators of the type, which run in Python only")
        if gen.draft_tokens:
            self._refuse(node, "draft_then_constrain runs in Python only")
        name: dict[str, Any] = {} if gen.name is None else {"name": gen.name}
        return name | _options(self._graph, gen.options, node) | _constraint(gen.constraint)

    def _value(self, node: Node, value: TracedValue, writer: _BranchWriter) -> dict[str, Any]:
        """Returns a reference to the variable that holds `value` on this branch now, or the text of an argument."""
        source = next(iter(value._sources)) if len(value._sources) == 1 and value._is_plain else None
        if isinstance(source, Argument) and source.name in self._arguments:
            return {"text": self._arguments[source.name]}
        for name, known in writer.scope.items():
            path = _path_to(source, known) if source is not None else None
            if path is not None:
                return {"var": name, **({"index": list(path)} if path else {})}
        reason = "is not a variable there" if source is not None else "is computed from other values"
        self._refuse(node, f"the value of {value._label} {reason}")

    def _join(self, node: Join, writer: _BranchWriter) -> None:
        branches = [self._writers[number] for number in node.branches]
        for branch in branches:
            if branch.is_in_turn or branch.forked:
                self._refuse(node, "a branch has an open turn or a nested fork")
        program = [branch.root_nodes for branch in branches]
        writer.nodes.append({"fork": {"branches": program, "join": _JOINS[node.mode]}})
        if node.mode == "gather_variable":
            writer.scope |= gather_variables(writer.scope, [branch.scope for branch in branches])
        writer.forked = ()

    def _fork_of(self, writer: _BranchWriter) -> Node | None:
        forks = (node for node in self._graph.nodes if isinstance(node, ForkInto))
        return next((node for node in forks if node.branches == writer.forked), None)

    def _refuse(self, node: Node | None, reason: str) -> NoReturn:
        place = self._graph.place if node is None else node.place
        raise UnsupportedControlFlow(self._graph.name, [Problem(f"not a straight-line program: {reason}", place)])


_REASON_OF_NODE = {
    "Append": "tools, named groups and separate_reasoning run in Python only",
    "Join": "a race, or branches that are not joined right after their fork",
    "Adopt": "a branch is adopted",
}
_REASON_OF_ACTION = {
    "set": "the body sets a variable",
    "begin scope": "it uses var_scope",
    "end scope": "it uses var_scope",
    "read": "the {} of a state is read",
    "run tool": "a tool is run",
    "append result": "the result of a tool is appended",
    "end": "a call or a text is ended early",
}


def _path_to(source: Any, known: VariableSource) -> tuple[int, ...] | None:
    """Returns the indices of the value inside a variable: () for the variable itself, None if it is not there."""
    if isinstance(known, list):
        for index, item in enumerate(known):
            path = _path_to(source, item)
            if path is not None:
                return (index, *path)
        return None
    return () if known == source else None


def _options(graph: Graph, options: Options, node: Node | None) -> dict[str, Any]:
    """Returns sampling options under their names in the request."""
    fields: dict[str, Any] = {}
    for field, value in options.fields.items():
        name = NAMES["programs"].get(field)
        if name is None and field != "complete":
            place = graph.place if node is None else node.place
            raise UnsupportedControlFlow(
                graph.name, [Problem(f"not a straight-line program: {name_in('gen', field)}", place)]
            )
        if field == "logit_bias":
            value = {str(token): bias for token, bias in value.items()}  # JSON has texts as keys
        fields[name or field] = list(value) if isinstance(value, tuple) else value
    others = {"n": options.n, "same_seed": options.same_seed}
    return fields | {name: value for name, value in others.items() if value is not None}


def _constraint(spec: Spec | None) -> dict[str, Any]:
    if spec is None:
        return {}
    keyword, value = keyword_of(spec) or ("constraint", msgspec.to_builtins(spec))
    return {keyword: value}
