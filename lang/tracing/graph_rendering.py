"""Renders a graph as text and as a Mermaid flowchart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from plait.constrained.specs import Choices, JsonObject, JsonSchema, Regex, Spec
from plait.lang.core.expressions import Gen, GenToolCall, RoleBegin, RoleEnd, Select, SystemWithTools, Text
from plait.lang.derived.captures import GenWithCaptures
from plait.lang.derived.reasoning import SeparateReasoning
from plait.lang.sampling_options import KEYWORD_OF_FIELD, Options
from plait.lang.tracing.nodes import (
    Adopt,
    Append,
    AppendToolResult,
    BeginScope,
    Cancel,
    EndScope,
    ForkInto,
    Join,
    Node,
    Read,
    RunTool,
    SetVariable,
    traced_values_in,
)
from plait.lang.tracing.traced_value import Argument, TracedValue

if TYPE_CHECKING:
    from plait.lang.tracing.graph import Graph

_MAX_LABEL_CHARS = 72


def as_text(graph: Graph) -> str:
    """Returns one line per step; the steps of a branch are indented below its fork."""
    location = f" at {graph.place}" if graph.place is not None else ""
    lines = [f"program {graph.name}({', '.join(graph.parameters)}){location}"]
    if graph.defaults.fields or graph.defaults.n or graph.defaults.template_variables:
        lines.append(f"  defaults {_options(graph.defaults)}")
    return "\n".join([*lines, *_lane_lines(graph, 0, 1)])


def _lane_lines(graph: Graph, lane: int, depth: int) -> Iterator[str]:
    inside = 0  # the number of open turns and scopes
    for node in graph.nodes:
        if node.lane != lane:
            continue
        if isinstance(node, EndScope) or (isinstance(node, Append) and isinstance(node.expr, RoleEnd)):
            inside = max(0, inside - 1)
            continue
        indent = "  " * (depth + inside)
        yield f"{indent}{describe_node(node)}"
        if isinstance(node, BeginScope) or (isinstance(node, Append) and isinstance(node.expr, RoleBegin)):
            inside += 1
        if isinstance(node, ForkInto):
            for index, branch in enumerate(node.branches):
                yield f"{indent}  branch {index}"
                yield from _lane_lines(graph, branch, depth + inside + 2)


def describe_node(node: Node) -> str:
    """Returns a short description of a step."""
    match node:
        case Append(expr=expr):
            return _describe_expr(expr)
        case SetVariable():
            return f"set {node.name} = {_short(_value(node.value))}"
        case BeginScope() | EndScope():
            return f"scope {node.name}"
        case ForkInto():
            return f"fork into {len(node.branches)}"
        case Join():
            won = f", the first {node.winners} of a race" if node.winners is not None else ""
            return f"join {'variables' if node.mode == 'gather_variable' else 'texts'}{won}"
        case Adopt():
            return f"continue as branch {node.index}"
        case Read():
            return f"read the {node.what}"
        case RunTool():
            return f"run the tool of {node.name}"
        case AppendToolResult():
            return f"result of {node.name} = {_short(_value(node.value))}"
        case Cancel():
            return f"end {node.name or 'this text'}"
    return type(node).__name__


def _describe_expr(expr: Any) -> str:
    match expr:
        case Text():
            return _short(json.dumps(expr.text, ensure_ascii=False))
        case TracedValue():
            return _short(expr._label)
        case Gen():
            rule = (
                f"type={expr.value_format.type_name}"
                if expr.value_format is not None
                else _constraint_label(expr.constraint)
            )
            retries = f"retries={expr.retries}" if expr.retries else "after a draft" if expr.draft_tokens else ""
            return " ".join(filter(None, ["gen", expr.name, _short(rule), _options(expr.options), retries]))
        case Select():
            return " ".join(filter(None, ["select", expr.name, _short(json.dumps(expr.choices, ensure_ascii=False))]))
        case GenToolCall():
            tools = ", ".join(tool.name for tool in expr.tools)
            return " ".join(filter(None, ["gen", expr.name, f"tools=[{tools}]", _options(expr.options)]))
        case GenWithCaptures():
            return f"{_describe_expr(expr.gen)}, groups {', '.join(expr.names)}"
        case SeparateReasoning():
            return f"{_describe_expr(expr.gen)}, reasoning separated"
        case RoleBegin() | RoleEnd():
            return str(expr.role)
        case SystemWithTools():
            return f"system, with tools {', '.join(tool.name for tool in expr.tools)}"
    return type(expr).__name__


def _value(value: Any) -> str:
    return value._label if isinstance(value, TracedValue) else repr(value)


def _constraint_label(spec: Spec | None) -> str:
    match spec:
        case None:
            return ""
        case Regex(pattern):
            return f"regex={json.dumps(pattern, ensure_ascii=False)}"
        case Choices(choices):
            return f"choices={json.dumps(choices, ensure_ascii=False)}"
        case JsonSchema():
            return f"json_schema={spec.text}"
        case JsonObject():
            return "a JSON object"
    return f"{type(spec).__name__.lower()} grammar"


def _options(options: Options) -> str:
    keywords: dict[str, Any] = {KEYWORD_OF_FIELD[field]: value for field, value in options.fields.items()}
    if options.n:
        keywords["n"] = options.n
    if options.same_seed is not None:
        keywords["same_seed"] = options.same_seed
    if options.template_variables:
        keywords["chat_template_kwargs"] = options.template_variables
    shown = {
        name: list(value) if isinstance(value, tuple) else value for name, value in keywords.items() if value != ()
    }
    return " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in shown.items())


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LABEL_CHARS else f"{text[: _MAX_LABEL_CHARS - 3]}..."


# -- Mermaid --------------------------------------------------------------------------------------


def as_mermaid(graph: Graph) -> str:
    """Returns a Mermaid flowchart, see https://mermaid.js.org/syntax/flowchart.html."""
    drawing = _Flowchart(graph)
    return "\n".join(["flowchart TD", *drawing.boxes(), *drawing.values()])


class _Flowchart:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._last: dict[int, list[str]] = {0: ["start"]}  # for each branch, the boxes before its next step

    def boxes(self) -> Iterator[str]:
        """Yields a box for each step, and arrows from the boxes before it."""
        title = f"{self._graph.name}({', '.join(self._graph.parameters)})"
        yield f"  start([{_quoted(title)}])"
        for number, node in enumerate(self._graph.nodes):
            if isinstance(node, EndScope) or (isinstance(node, Append) and isinstance(node.expr, RoleEnd)):
                continue
            yield f"  n{number}{_shape(node)}"
            predecessors = self._last[node.lane]
            if isinstance(node, Join | Adopt):
                predecessors = [box for branch in node.branches for box in self._last[branch]]
            for predecessor in dict.fromkeys(predecessors):
                yield f"  {predecessor} --> n{number}"
            self._last[node.lane] = [f"n{number}"]
            if isinstance(node, ForkInto):
                self._last.update({branch: [f"n{number}"] for branch in node.branches})

    def values(self) -> Iterator[str]:
        """Yields a dotted arrow for each value, from the step that produces it to a step that uses it."""
        for number, node in enumerate(self._graph.nodes):
            sources = dict.fromkeys(
                source for value in traced_values_in(node) for source in sorted(value._sources, key=str)
            )
            for source in sources:
                name = _quoted(source.name or "text")
                origin = "start" if isinstance(source, Argument) else f"n{source.node}"
                yield f"  {origin} -. {name} .-> n{number}"


def _shape(node: Node) -> str:
    """Returns the box of a step: rounded for calls, slanted for text, a hexagon for forks and joins."""
    label = _quoted(describe_node(node))
    if isinstance(node, ForkInto | Join | Adopt):
        return "{{" + label + "}}"
    if isinstance(node, Append) and node.is_call:
        return f"({label})"
    if isinstance(node, Append) and isinstance(node.expr, Text | TracedValue):
        return f"[/{label}/]"
    return f"[{label}]"


def _quoted(text: str) -> str:
    """Returns `text` quoted and escaped for Mermaid, whose entities begin with `#` and end with `;`."""
    escaped = {'"': "#quot;", "#": "#35;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"}
    return '"' + "".join(escaped.get(letter, letter) for letter in text) + '"'
