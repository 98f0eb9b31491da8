"""The fault suite: a broken promise, an error and a group that hangs are reported; resources that run out."""

from __future__ import annotations

import importlib
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from faults import all as suite
from faults.figures import Figure, Scale, at_most, none_of
from faults.groups import resources

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
KEPT, BROKEN = at_most("a", 1, 2, "ms"), at_most("b", 3, 2, "ms")


def run(monkeypatch, inflict) -> int:
    """The exit code of the suite with one group."""
    monkeypatch.setattr(suite, "GROUPS", {"fake": 1})
    monkeypatch.setitem(sys.modules, "faults.groups.fake", SimpleNamespace(inflict=inflict))
    monkeypatch.setattr(sys, "argv", ["all.py"])
    monkeypatch.setattr(suite, "unwind_on_signal", lambda: None)
    return suite.main()


def test_the_exit_code_tells_of_a_broken_promise(monkeypatch, capsys) -> None:
    assert run(monkeypatch, lambda scale: iter([KEPT])) == 0
    assert run(monkeypatch, lambda scale: iter([KEPT, BROKEN])) == 1
    assert "| fake | b | <= 2 ms | 3 ms | **broken** |" in capsys.readouterr().out


def test_an_error_is_a_broken_promise(monkeypatch, capsys) -> None:
    def fail(scale: Scale):
        yield KEPT
        raise ConnectionError("the server is gone")

    assert run(monkeypatch, fail) == 1
    assert "ConnectionError: the server is gone" in capsys.readouterr().out


def test_a_group_that_hangs_is_ended(monkeypatch, capsys) -> None:
    def hang(scale: Scale):
        time.sleep(60)
        yield KEPT

    assert run(monkeypatch, hang) == 1
    assert "longer than 1 s" in capsys.readouterr().out


def test_figures_without_a_case_are_broken() -> None:
    assert not none_of("a", [], 0, "lost").is_kept and not none_of("a", ["x"], 5, "lost").is_kept
    assert none_of("a", [], 5, "lost").is_kept
    assert not at_most("a", float("inf"), 2, "s").is_kept and not at_most("a", float("nan"), 2, "s").is_kept


def test_every_group_has_a_module_and_its_promise_on_the_page() -> None:
    for group in suite.GROUPS:
        assert callable(importlib.import_module(f"faults.groups.{group}").inflict)
    assert re.findall(r"\| `make faults`: `(\w+)`", PAGE.read_text()) == list(suite.GROUPS)


@pytest.mark.skipif(sys.platform != "linux", reason="2026-11-23: limits of other processes are Linux's prlimit")
def test_resources_that_run_out() -> None:
    """Without descriptors, memory of the runtime, and disk space. Times are not compared."""
    figures: list[Figure] = list(resources.exhausted(Scale(is_short=True)))
    assert [figure for figure in figures if not figure.is_kept and not figure.is_timed] == []
    assert len(figures) >= 6
