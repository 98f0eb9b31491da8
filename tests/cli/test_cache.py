"""`plait cache`: what it lists, and that it removes nothing but files that plait wrote."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from plait.cli import main

HASH = "0123456789abcdef" * 2
MODEL = "a5fd3b62230aa5ec/gemma-3-270m-q4_k_m.gguf"
WRITTEN = {
    "kernels": f"cache/plait/kernels/decoder-{HASH}.o",
    "prefetches": f"cache/plait/kernels/prefetches-{HASH}.o",
    "weights": f"cache/plait/packed-weights/{HASH}.weights",
    "models": f"cache/plait/{MODEL}",
    "history": "state/plait/chat_history",
}
OTHERS = (
    f"cache/plait/kernels/decoder-{HASH}.0123456789abcdef.part",
    "cache/plait/kernels/kernels.lock",
    "cache/plait/kernels/notes.o",
    f"cache/plait/packed-weights/{HASH}.part",
    "cache/plait/packed-weights/mine.weights",
    "cache/plait/a5fd3b62230aa5ec/mine.gguf",
    "cache/plait/0123456789abcdef/mine.gguf",
    "state/plait/notes",
)


@pytest.fixture
def home(monkeypatch, tmp_path):
    for name in ("PLAIT_KERNEL_CACHE_DIR", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("cache", "state"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    for name in (*WRITTEN.values(), *OTHERS):
        (tmp_path / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 150_000)
        os.utime(tmp_path / name, (1e9, 1e9))
    return tmp_path


def present(home):
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def test_each_kind_has_a_line(home, capsys):
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(WRITTEN)
    for line, name in zip(lines, WRITTEN.values(), strict=True):
        assert (" 1 file " in line and " 0.1 MB " in line) or " 0.2 MB " in line
        assert "last used 2001-09-" in line and line.endswith(str((home / name).parent))


@pytest.mark.parametrize("kind", [None, *WRITTEN])
def test_only_files_that_plait_wrote_are_removed(home, capsys, kind):
    assert main(["cache", "clear", *([kind] if kind else []), "--yes"]) == 0
    removed = {WRITTEN[kind]} if kind else set(WRITTEN.values()) - {WRITTEN["history"]}
    assert present(home) == {*WRITTEN.values(), *OTHERS} - removed
    files = "1 file" if kind else f"{len(removed)} files"
    assert f"removed {files}, {0.15 * len(removed):.1f} MB" in capsys.readouterr().out


def test_links_are_not_followed(home, capsys):
    weights, elsewhere = home / "cache/plait/packed-weights", home / "elsewhere"
    weights.rename(elsewhere)
    weights.symlink_to(elsewhere)
    kernel = home / WRITTEN["kernels"]
    kernel.unlink()
    kernel.symlink_to(home / OTHERS[2])
    before = present(home)
    assert main(["cache", "clear", "weights", "--yes"]) == 0 and main(["cache", "clear", "kernels", "--yes"]) == 0
    assert present(home) == before and kernel.is_symlink()
    assert capsys.readouterr().out.count("removed 0 files") == 2


@pytest.mark.parametrize(("answer", "is_removed"), [("y", True), ("Yes", True), ("", False), ("n", False)])
def test_it_asks(home, monkeypatch, capsys, answer, is_removed):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    assert main(["cache", "clear", "weights"]) == (0 if is_removed else 1)
    assert (home / WRITTEN["weights"]).exists() is not is_removed


def test_without_a_terminal_it_removes_nothing_unasked(home, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["cache", "clear"]) == 1
    assert "nothing was removed; --yes" in capsys.readouterr().err
    assert present(home) == {*WRITTEN.values(), *OTHERS}


def test_what_cannot_be_removed_is_named(home, monkeypatch, capsys):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    assert main(["cache", "clear", "weights", "--yes"]) == 1
    assert f"{home / 'cache/plait/packed-weights'}: Permission denied" in capsys.readouterr().err


def test_without_a_home_it_says_so(monkeypatch, capsys):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert main(["cache"]) == 1 and "no home folder; set HOME" in capsys.readouterr().err


def test_yes_without_clear_is_an_error(home, capsys):
    assert main(["cache", "--yes"]) == 1
    assert "--yes needs clear" in capsys.readouterr().err and present(home) == {*WRITTEN.values(), *OTHERS}


def test_folders_that_do_not_exist_are_empty(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("PLAIT_KERNEL_CACHE_DIR", str(tmp_path / "none"))
    assert main(["cache"]) == 0 and main(["cache", "clear", "--yes"]) == 0
    assert not (tmp_path / "none").exists()
