"""Building blocks of the displays. Every text that comes from a program or a model passes through `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("display.css").read_text(encoding="utf-8")
_LABELS = {"queue": "waiting", "compile": "compiling constraints"}
_TITLES = {
    "cached": "prompt tokens found in the prefix cache",
    "computed": "prompt tokens that the model computed",
    "recomputed": "tokens computed again because the KV cache was full",
    "sampled": "tokens that the model sampled",
    "drafted": "tokens that were drafted, and accepted by the model",
    "forced": "tokens that a constraint left no choice of",
    "lost": "tokens of calls that failed or were cancelled",
}


def fragment(*parts: str) -> str:
    """Returns a display for a notebook: the parts with their style, which applies to nothing else."""
    return f'<style>{STYLE}</style><div class="plait">{"".join(parts)}</div>'


def box(class_: str, *parts: str, tag: str = "div", title: str = "") -> str:
    """Returns an element around the parts, which are HTML. `title`: a text, shown on hover."""
    shown = f' title="{escape(title)}"' if title else ""
    return f'<{tag} class="{class_}"{shown}>{"".join(parts)}</{tag}>'


def pre(html: str) -> str:
    """Returns preformatted text. A line break at its beginning stays, which a parser would remove."""
    return f"<pre>\n{html}</pre>"


def key(amounts: Mapping[str, object], lead: str = "") -> str:
    """Returns a legend of kinds with their amounts; those of zero are left out."""
    entries = []
    for kind, amount in amounts.items():
        if amount:
            entry = f'<i class="{kind}"></i><b>{escape(str(amount))}</b> {_LABELS.get(kind, kind)}'
            entries.append(box("", entry, tag="span", title=_TITLES.get(kind, "")))
    return box("key", f"<span>{lead}</span>" if lead else "", *entries)


def state_mark(state: str, title: str = "") -> str:
    """Returns the mark of a state: running, done, failed or cancelled."""
    return box(f"state {state}", escape(state), tag="span", title=title)


def table(head: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table that scrolls sideways where it is too wide. `head`: for each column its title, and whether it has
    numbers. The cells of `rows` are HTML."""
    columns = [(escape(title), ' class="num"' if is_number else "") for title, is_number in head]
    first = "".join(f'<th scope="col"{class_}>{title}</th>' for title, class_ in columns)
    body = "".join(
        f"<tr>{''.join(f'<td{class_}>{cell}</td>' for cell, (_, class_) in zip(row, columns, strict=True))}</tr>"
        for row in rows
    )
    return box("scroll", f"<table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table>")


def seconds(value: float) -> str:
    """Returns a duration, in milliseconds where it is short.

    >>> seconds(0.0312), seconds(2.5)
    ('31 ms', '2.50 s')
    """
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun.

    >>> counted(1, "call"), counted(1200, "branch", "branches")
    ('1 call', '1,200 branches')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
