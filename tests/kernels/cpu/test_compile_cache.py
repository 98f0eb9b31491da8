"""A kept kernel's key must change with any file that it was made of."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from numba.core import caching

from plait.kernels.cpu import compile_cache, decoder_kernels, precompile


@pytest.mark.parametrize("name", ["forward", "compute_logits"])
def test_what_is_kept_captures_the_stamp(name) -> None:
    function = getattr(decoder_kernels, name).py_func
    assert [cell.cell_contents for cell in function.__closure__].count(compile_cache.SOURCE_HASH) == 1


def test_the_stamp_tells_a_changed_file(tmp_path) -> None:
    for file in Path(compile_cache.__file__).parent.glob("cpu_*.py"):
        shutil.copy(file, tmp_path)
    assert stamp_of(tmp_path) == compile_cache.SOURCE_HASH
    changed = tmp_path / "cpu_tile.py"
    changed.write_text(changed.read_text() + "\n")
    assert stamp_of(tmp_path) != compile_cache.SOURCE_HASH


def test_missing_kernels_are_compiled_by_processes_and_only_once(tmp_path, monkeypatch) -> None:
    """With their mark elsewhere; the kernels themselves are kept already, so that this is quick."""
    messages: list[str] = []
    monkeypatch.setattr(precompile, "_marker_path", lambda: tmp_path / "mark")
    for _ in range(2):
        precompile.compile_missing(messages.append)
    assert len(messages) == 1 and (tmp_path / "mark").exists()


def test_of_two_that_miss_the_same_kernels_one_compiles(tmp_path, monkeypatch) -> None:
    compiled, both = [], threading.Barrier(2)

    def compile_all() -> bool:
        compiled.append(1)
        return True

    monkeypatch.setattr(precompile, "_marker_path", lambda: tmp_path / "mark")
    monkeypatch.setattr(precompile, "_compile_in_subprocesses", compile_all)
    others = [threading.Thread(target=precompile.compile_missing, args=(lambda said: both.wait(60),)) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert compiled == [1] and (tmp_path / "mark").exists()


def test_without_names_what_is_missing_is_compiled(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["precompile"])
    monkeypatch.setattr(precompile, "_marker_path", lambda: tmp_path / "mark")
    monkeypatch.setattr(precompile, "_compile_in_subprocesses", lambda: True)
    precompile.main()
    assert (tmp_path / "mark").exists() and "compiling kernels" in capsys.readouterr().out


def test_kernels_that_do_not_compile_leave_no_mark(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(precompile, "_marker_path", lambda: tmp_path / "mark")
    monkeypatch.setattr(precompile, "KERNELS", {"forward": None, "nothing of that name": None})
    precompile.compile_missing(lambda doing: None)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("command", ["", "never ends"])
def test_children_that_cannot_start_or_never_end_are_done_without(command, tmp_path, monkeypatch) -> None:
    """As where Python is part of another program, whose path is no interpreter's."""
    if command:
        program = tmp_path / "program"
        program.write_text("#!/bin/sh\nexec sleep 1000\n")
        program.chmod(0o700)
        command = str(program)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[-1])
    monkeypatch.setattr(precompile.sys, "executable", command)
    monkeypatch.setattr(precompile, "COMPILE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(precompile, "_marker_path", lambda: tmp_path / "mark")
    precompile.compile_missing(lambda doing: None)
    assert len(started) == (len(precompile.KERNELS) if command else 0)
    assert all(child.returncode is not None for child in started)
    assert not (tmp_path / "mark").exists()


def test_where_no_folder_can_be_written_nothing_is_kept_and_all_is_computed(monkeypatch) -> None:
    """As in a container that is read-only."""

    def refuse(locator):
        raise OSError("read-only")

    for kind in caching.CacheImpl._locator_classes:
        monkeypatch.setattr(kind, "ensure_cache_path", refuse)
    function = compile_cache.cached_njit()(lambda x: x + 1)
    assert function(2) == 3 and function.stats.cache_path is None
    monkeypatch.setattr(decoder_kernels, "forward", function)
    messages: list[str] = []
    precompile.compile_missing(messages.append)
    assert messages == []


def stamp_of(folder: Path) -> int:
    spec = importlib.util.spec_from_file_location("copied", folder / "cpu_cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SOURCE_HASH
