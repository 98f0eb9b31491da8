"""Renders a graph as text and as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from plait.lang.core.expressions import Text
from plait.lang.tracing.labels import describe_options
from plait.lang.tracing.nodes import Adopt, Append, ForkInto, Join, Node, traced_values_in
from plait.lang.tracing.traced_value import Argument, TracedValue

if TYPE_CHECKING:
    from plait.lang.tracing.graph import Graph


def as_text(graph: Graph) -> str:
    """Returns one line per step; the steps of a branch are indented below its fork."""
    location = f" at {graph.place}" if graph.place is not None else ""
    lines = [f"program {graph.name}({', '.join(graph.parameters)}){location}"]
    if graph.defaults.fields or graph.defaults.n or graph.defaults.template_variables:
        lines.append(f"  defaults {describe_options(graph.defaults)}")
    return "\n".join([*lines, *_branch_lines(graph, 0, 1)])


class Step(NamedTuple):
    """`depth`: the number of open turns and scopes around it. `kind`: "call", "text", "fork" or "other". `branches`:
    those of a fork."""

    depth: int
    kind: str
    label: str
    branches: tuple[int, ...]


def steps(graph: Graph, branch_id: int) -> Iterator[Step]:
    """Yields the steps of a branch."""
    inside = 0
    for node in graph.nodes:
        if node.branch_id == branch_id and node.nesting < 0:
            inside = max(0, inside - 1)
        elif node.branch_id == branch_id:
            yield Step(inside, _kind(node), node.describe(), tuple(node.branches) if isinstance(node, ForkInto) else ())
            inside += node.nesting


def _branch_lines(graph: Graph, branch_id: int, depth: int) -> Iterator[str]:
    for step in steps(graph, branch_id):
        indent = "  " * (depth + step.depth)
        yield f"{indent}{step.label}"
        for index, branch in enumerate(step.branches):
            yield f"{indent}  branch {index}"
            yield from _branch_lines(graph, branch, depth + step.depth + 2)


def _kind(node: Node) -> str:
    if isinstance(node, ForkInto | Join | Adopt):
        return "fork"
    if not isinstance(node, Append):
        return "other"
    return "call" if node.is_call else "text" if isinstance(node.expr, Text | TracedValue) else "other"


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
            if node.nesting < 0:
                continue
            yield f"  n{number}{_shape(node)}"
            predecessors = self._last[node.branch_id]
            if isinstance(node, Join | Adopt):
                predecessors = [box for branch in node.branches for box in self._last[branch]]
            for predecessor in dict.fromkeys(predecessors):
                yield f"  {predecessor} --> n{number}"
            self._last[node.branch_id] = [f"n{number}"]
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
    before, after = {"fork": ("{{", "}}"), "call": ("(", ")"), "text": ("[/", "/]"), "other": ("[", "]")}[_kind(node)]
    return before + _quoted(node.describe()) + after


def _quoted(text: str) -> str:
    """Returns `text` quoted and escaped for Mermaid, whose entities begin with `#` and end with `;`."""
    escaped = {'"': "#quot;", "#": "#35;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;"}
    return '"' + "".join(escaped.get(letter, letter) for letter in text) + '"'
