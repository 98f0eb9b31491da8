"""What a start shows: a bar on a terminal and in a notebook, lines elsewhere."""

from __future__ import annotations

import io
import sys
import time

from fake_notebook import open_notebook

from plait.kernels.cpu import precompile
from plait.runtime.process.runtime import BAR_DELAY_S, LINES_DELAY_S, is_compiling, startup_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch) -> Terminal:
    """Replaces standard error in the test itself; pytest would replace it again after a fixture."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_bar_shows_at_once_that_kernels_are_compiled_and_moves(monkeypatch) -> None:
    terminal = open_terminal(monkeypatch)
    display = startup_display(None, time.monotonic())
    display.show(0.9, "loading kernels")
    assert terminal.getvalue() == "", "quick starts show nothing"
    for percent in (0, 40, 80):
        display.show(percent / 100, precompile.COMPILING)
        assert f"{precompile.COMPILING} " in terminal.getvalue() and f"{percent:3}%" in terminal.getvalue()
    display.close()


def test_a_bar_that_shows_something_else_is_renamed(monkeypatch) -> None:
    terminal = open_terminal(monkeypatch)
    display = startup_display(True, time.monotonic() - 2 * BAR_DELAY_S)
    display.show(0.9, "loading kernels")
    display.show(0.9, "warming up")
    assert "loading kernels" in terminal.getvalue() and "warming up" in terminal.getvalue()
    display.close()


def test_a_bar_of_a_notebook_leaves_nothing(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    outputs = open_notebook(monkeypatch)
    display = startup_display(None, time.monotonic() - 2 * BAR_DELAY_S)
    display.show(0.9, "loading kernels")
    assert len(outputs) == 1 and "loading kernels" in outputs[0].updates[-1]["text/plain"]
    display.close()
    assert outputs[0].updates[-1] == {"text/plain": ""}
    assert sys.stderr.getvalue() == "", "notebooks show it on red ground"


def test_without_a_terminal_lines_are_written(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    display = startup_display(None, time.monotonic())
    display.show(0.9, "loading kernels")
    for percent in range(10):
        display.show(percent / 100, f"{precompile.COMPILING}: {percent} functions")
    display.show(1.0, "ready")
    lines = sys.stderr.getvalue().splitlines()
    assert len(lines) == 2 and "compiling kernels" in lines[0] and "ready" in lines[1]


def test_a_function_gets_the_lines(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines: list[str] = []
    display = startup_display(lines.append, time.monotonic())
    display.show(0.5, f"{precompile.COMPILING}: 3 functions")
    display.show(1.0, "ready")
    assert len(lines) == 2 and "compiling kernels" in lines[0] and "ready" in lines[1]
    assert sys.stderr.getvalue() == ""


def test_slow_loading_is_a_line_too(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    display = startup_display(None, time.monotonic() - LINES_DELAY_S)
    display.show(0.25, "loading the model")
    display.show(0.26, "loading the model")
    assert sys.stderr.getvalue() == "plait: loading the model, after 5 s [25%]\n"


def test_nothing_is_shown_where_that_is_asked_for(monkeypatch) -> None:
    terminal = open_terminal(monkeypatch)
    display = startup_display(False, time.monotonic() - 100)
    display.show(0.0, precompile.COMPILING)
    display.close()
    assert terminal.getvalue() == ""


def test_a_closed_standard_error_does_not_stop_a_start(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", closed := io.StringIO())
    display = startup_display(None, time.monotonic())
    closed.close()
    display.show(0.0, precompile.COMPILING)  # raises nothing
    assert sys.stderr is closed


def test_the_text_of_the_compiler_is_recognized() -> None:
    assert is_compiling(precompile.COMPILING) and not is_compiling("ready")
