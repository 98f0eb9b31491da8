"""Text for people: colours where a terminal wants them, no control characters of others, and where bars can move."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import TextIO

from plait.host.notebook import NotebookLine, in_notebook

STYLES = {"dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}  # Unicode's pictures of them
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Concern(str):
    """A fact of a report that its reader may want to change; a str otherwise."""


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a stream is open and is a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def shows_bars() -> bool:
    """Returns whether a bar on `bar_stream()` can be drawn again in its place: on a terminal and in a notebook."""
    return is_terminal(sys.stderr) or in_notebook()


def bar_stream() -> TextIO | NotebookLine:
    """Returns where a bar is drawn."""
    return NotebookLine() if in_notebook() else sys.stderr


def styled(text: str, style: str, stream: TextIO) -> str:
    """Returns the text in a style of STYLES, or as it is where `stream` shows none.

    That is: no terminal, the variable NO_COLOR is not empty (no-color.org), or TERM is "dumb" or missing.

    >>> styled("no model", "red", io.StringIO())                          # doctest: +SKIP
    'no model'
    """
    if not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def print_error(text: str) -> None:
    """Prints a message of plait to standard error, red on a terminal."""
    print(styled(shown(f"plait: {text}", sys.stderr), "red", sys.stderr), file=sys.stderr)


def print_facts(facts: Mapping[str, object]) -> None:
    """Prints one line per fact to standard output. A terminal has them wrapped, and the names green, or yellow at a
    Concern."""
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        text = shown(f"{name:<{width}}{value!s}", sys.stdout)
        if is_terminal(sys.stdout):
            columns = shutil.get_terminal_size().columns
            indent = " " * min(width, columns // 2)
            text = textwrap.fill(
                text, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
            )
        print(styled(name, "yellow" if isinstance(value, Concern) else "green", sys.stdout) + text[len(name) :])


def shown(text: str, stream: TextIO) -> str:
    """Returns a text that is not plait's own as it may be written: on a terminal its control characters are visible
    signs, so that none moves the cursor, sets a title or answers for the user. Line ends and tabs stay."""
    return text.translate(_VISIBLE) if is_terminal(stream) else text
