"""Beams and compiled graphs as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from plait.lang.core.expressions import Text
from plait.lang.display.html import box, fragment, pre, table
from plait.lang.tracing.nodes import Append, ForkInto, Node
from plait.lang.tracing.traced_value import TracedValue

if TYPE_CHECKING:
    from plait.lang.control.beam import BeamHypothesis
    from plait.lang.tracing.graph import Graph


def beams_html(beams: Sequence[BeamHypothesis]) -> str:
    """Returns the texts of a beam search, best first."""
    head = [("", True), ("score", True), ("logprob", True), ("tokens", True), ("ended by", False), ("text", False)]
    rows = (
        [
            str(number),
            f"{beam.score:.3f}",
            f"{beam.logprob:.2f}",
            f"{beam.num_tokens:,}",
            escape(beam.finish_reason),
            pre(f"<mark>{escape(beam.text)}</mark>"),
        ]
        for number, beam in enumerate(beams, 1)
    )
    return fragment(table(head, rows))


def graph_html(graph: Graph) -> str:
    """Returns the steps of a program, with the branches of each fork side by side."""
    title = f"<b>{escape(graph.name)}</b><code>({escape(', '.join(graph.parameters))})</code>"
    place = box("soft", escape(str(graph.place)), tag="span") if graph.place is not None else ""
    steps = box("steps", *_steps(graph, 0), tag="ul")
    return fragment(box("card", box("head", title, place), steps))


def _steps(graph: Graph, branch_id: int) -> Iterator[str]:
    inside = 0  # the number of open turns and scopes
    for node in graph.nodes:
        if node.branch_id != branch_id:
            continue
        if node.nesting < 0:
            yield "</ul></li>" if inside else ""
            inside = max(0, inside - 1)
            continue
        yield f"<li>{_label(node)}"
        if node.nesting > 0:
            yield '<ul class="steps">'
            inside += 1
            continue
        if isinstance(node, ForkInto):
            branches = enumerate(node.branches)
            yield box(
                "branches",
                *(box("branch", f"<b>branch {i}</b>", box("steps", *_steps(graph, b), tag="ul")) for i, b in branches),
            )
        yield "</li>"
    yield "</ul></li>" * inside


def _label(node: Node) -> str:
    label = escape(node.describe())
    if isinstance(node, Append) and node.is_call:
        return f"<mark><code>{label}</code></mark>"
    is_text = isinstance(node, Append) and isinstance(node.expr, Text | TracedValue)
    return f"<code>{label}</code>" if is_text else f'<code class="soft">{label}</code>'
