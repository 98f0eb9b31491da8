"""The console script: Ctrl-C while it imports the command line."""

from __future__ import annotations

import sys

import plait
from plait import cli, entry


def test_ctrl_c_during_the_imports_shows_no_traceback(monkeypatch, capsys) -> None:
    class Interrupting:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "plait.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "plait.cli")
    monkeypatch.delattr(plait, "cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting, *sys.meta_path])
    assert entry.main() == 130
    assert capsys.readouterr().err == "plait: interrupted\n"


def test_the_script_runs_the_command_line(monkeypatch) -> None:
    monkeypatch.setattr(cli, "main", lambda: 7)
    assert entry.main() == 7
