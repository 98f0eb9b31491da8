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

from plait.kernels import cpu_cache, cpu_kept, cpu_step


@pytest.mark.parametrize("name", ["forward", "project"])
def test_what_is_kept_captures_the_stamp(name) -> None:
    function = getattr(cpu_step, name).py_func
    assert [cell.cell_contents for cell in function.__closure__].count(cpu_cache.STAMP) == 1


def test_the_stamp_tells_a_changed_file(tmp_path) -> None:
    for file in Path(cpu_cache.__file__).parent.glob("cpu_*.py"):
        shutil.copy(file, tmp_path)
    assert stamp_of(tmp_path) == cpu_cache.STAMP
    changed = tmp_path / "cpu_tile.py"
    changed.write_text(changed.read_text() + "\n")
    assert stamp_of(tmp_path) != cpu_cache.STAMP


def test_missing_kernels_are_compiled_by_processes_and_only_once(tmp_path, monkeypatch) -> None:
    """With their mark elsewhere; the kernels themselves are kept already, so that this is quick."""
    told: list[str] = []
    monkeypatch.setattr(cpu_kept, "_mark", lambda: tmp_path / "mark")
    for _ in range(2):
        cpu_kept.compile_missing(told.append)
    assert len(told) == 1 and (tmp_path / "mark").exists()


def test_of_two_that_miss_the_same_kernels_one_compiles(tmp_path, monkeypatch) -> None:
    compiled, both = [], threading.Barrier(2)

    def compile_all() -> bool:
        compiled.append(1)
        return True

    monkeypatch.setattr(cpu_kept, "_mark", lambda: tmp_path / "mark")
    monkeypatch.setattr(cpu_kept, "_compiled_by_children", compile_all)
    others = [threading.Thread(target=cpu_kept.compile_missing, args=(lambda said: both.wait(60),)) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert compiled == [1] and (tmp_path / "mark").exists()


def test_without_names_what_is_missing_is_compiled(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu_kept"])
    monkeypatch.setattr(cpu_kept, "_mark", lambda: tmp_path / "mark")
    monkeypatch.setattr(cpu_kept, "_compiled_by_children", lambda: True)
    cpu_kept.main()
    assert (tmp_path / "mark").exists() and "compiling kernels" in capsys.readouterr().out


def test_kernels_that_do_not_compile_leave_no_mark(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu_kept, "_mark", lambda: tmp_path / "mark")
    monkeypatch.setattr(cpu_kept, "KERNELS", {"forward": None, "nothing of that name": None})
    cpu_kept.compile_missing(lambda doing: None)
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
    monkeypatch.setattr(cpu_kept.sys, "executable", command)
    monkeypatch.setattr(cpu_kept, "PATIENCE_S", 0.0)
    monkeypatch.setattr(cpu_kept, "_mark", lambda: tmp_path / "mark")
    cpu_kept.compile_missing(lambda doing: None)
    assert len(started) == (len(cpu_kept.KERNELS) if command else 0)
    assert all(child.returncode is not None for child in started)
    assert not (tmp_path / "mark").exists()


def test_where_no_folder_can_be_written_nothing_is_kept_and_all_is_computed(monkeypatch) -> None:
    """As in a container that is read-only."""

    def refuse(locator):
        raise OSError("read-only")

    for kind in caching.CacheImpl._locator_classes:
        monkeypatch.setattr(kind, "ensure_cache_path", refuse)
    function = cpu_cache.kept()(lambda x: x + 1)
    assert function(2) == 3 and function.stats.cache_path is None
    monkeypatch.setattr(cpu_step, "forward", function)
    told: list[str] = []
    cpu_kept.compile_missing(told.append)
    assert told == []


def stamp_of(folder: Path) -> int:
    spec = importlib.util.spec_from_file_location("copied", folder / "cpu_cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.STAMP
