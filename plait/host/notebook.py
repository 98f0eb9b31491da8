"""The notebook that this process serves, if there is one. IPython is used where it is loaded already."""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook: IPython in a terminal is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookLine:
    """A text stream for a bar: the last line written to it is one output of the cell, without the red ground that
    notebooks give to standard error. A line is what follows a carriage return; all else is ignored."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._handle: Any = None

    def write(self, text: str) -> None:
        from IPython.display import display

        if "\r" not in text:
            return
        shown = {"text/plain": text.rpartition("\r")[2].rstrip()}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def flush(self) -> None:
        """Does nothing: an output is shown at once."""
