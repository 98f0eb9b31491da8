"""Text for people: lines of facts at several widths, control characters, and where bars can move."""

from __future__ import annotations

import io
import sys

import pytest
from fake_notebook import open_notebook
from tqdm import tqdm

from plait.host.terminal import Concern, bar_stream, print_facts, shown, shows_bars

FACTS = {"device": "cpu", "packed weights": Concern("not kept on disk: the folder cannot be written"), "x": "\x1b[2J"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, columns: int, term: str = "xterm") -> str:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    for name, value in (("COLUMNS", str(columns)), ("TERM", term)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_facts(FACTS)
    return terminal.getvalue()


def test_facts_are_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts(FACTS)
    assert capsys.readouterr().out == (
        "device          cpu\npacked weights  not kept on disk: the folder cannot be written\nx               \x1b[2J\n"
    )


def test_facts_are_wrapped_and_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, 40)
    assert "\x1b[32mdevice\x1b[0m          cpu\n" in text
    assert "\x1b[33mpacked weights\x1b[0m  not kept on disk: the\n                folder cannot be written\n" in text
    assert text.endswith("␛[2J\n")
    assert printed(monkeypatch, 28, "dumb").splitlines()[1:3] == [
        "packed weights  not kept on",
        " " * 14 + "disk: the",
    ]


def test_control_characters_are_visible_on_a_terminal_only() -> None:
    text = "".join(map(chr, range(0xA1))) + "é漢🙂"
    assert shown(text, io.StringIO()) == text
    visible = shown(text, Terminal())
    assert len(visible) == len(text) and visible.endswith("\xa0é漢🙂") and {"\n", "\t"} <= {*visible}
    assert [char for char in visible if char != "\xa0" and not char.isprintable()] == ["\t", "\n"]


def test_bars_move_on_a_terminal_and_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert not shows_bars()
    with monkeypatch.context() as notebook:
        open_notebook(notebook)
        assert shows_bars()
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shows_bars() and bar_stream() is sys.stderr


def test_a_bar_of_a_notebook_is_one_output_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    outputs = open_notebook(monkeypatch)
    with tqdm(total=2, file=bar_stream()) as bar:
        bar.update(2)
    kept, removed = outputs[0], tqdm(total=2, leave=False, file=bar_stream())
    removed.close()
    assert len(outputs) == 2 and sys.stderr.getvalue() == ""
    assert "0/2" in kept.updates[0]["text/plain"] and "2/2" in kept.updates[-1]["text/plain"]
    assert all(line == line.strip("\r\n") for output in outputs for line in output.updates[-1].values())
    assert "0/2" in outputs[1].updates[0]["text/plain"] and outputs[1].updates[-1] == {"text/plain": ""}
