"""Terminals of text that stands as it is, up to the mark that ends it."""

from __future__ import annotations

from plait.constrained.structural.marks import Marks, regex_literal


def ended_text(body: str, end: str, name: str, marks: Marks) -> tuple[str, tuple[str, ...]]:
    """Returns the expression of a text and its end, and the terminals that it refers to, whose names begin with `name`.

    body: the expression of the text as part of a terminal. The end does not occur in the text and its end together
    before it ends them, so a reader may search for it. No text can contain a control token, so what follows one in
    `end` excludes nothing.
    """
    plain, control = marks.split(end)
    if control and not plain:
        return f"{name} {control}", (f"{name}: {body}",)
    rules = [f"{name}B: {body}", f"{name}E: {name}B {marks.literal(plain)}"]
    if control:
        return f"{name}E {control}", tuple(rules)
    rules.append(f"{name}: {name}E & ~/(?s:.*){regex_literal(plain)}(?s:.+)/")
    return name, tuple(rules)
