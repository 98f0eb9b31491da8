"""A double of IPython as the kernel of a notebook has it, with the outputs of a cell."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace


class Output:
    """One output of a cell; `updates`: what it showed, in order."""

    def __init__(self, shown):
        self.updates = [shown]
        self.changed = threading.Condition()

    def update(self, shown, raw=False):
        with self.changed:
            self.updates.append(shown)
            self.changed.notify_all()

    def wait_for(self, text):
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.updates[-1], 60)


def open_notebook(monkeypatch) -> list[Output]:
    """Makes this process the kernel of a notebook. Returns the outputs of its cell."""
    outputs: list[Output] = []

    def display(value, display_id=None, raw=False):
        outputs.append(Output(value))
        return outputs[-1] if display_id else None

    ipython, ipython_display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    ipython_display.display, ipython_display.HTML = display, str
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython_display)
    return outputs
