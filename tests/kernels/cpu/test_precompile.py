"""Compiling the cached kernels ahead, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from plait.kernels.cpu import precompile


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The path of the file that marks the kernels as compiled, which does not exist yet."""
    monkeypatch.setattr(precompile, "_marker_path", lambda: tmp_path / "marker")
    return tmp_path / "marker"


def test_missing_kernels_are_compiled_once(marker) -> None:
    """The processes find the kernels in the cache, so this is quick."""
    begins: list[str] = []
    for _ in range(2):
        precompile.compile_missing(
            lambda fraction, doing: begins.append(doing) if doing == precompile.COMPILING else None
        )
    assert len(begins) == 1 and marker.exists()


def test_of_two_concurrent_starts_only_one_compiles(marker, monkeypatch) -> None:
    compiled, both, waits = [], threading.Barrier(2), threading.Event()

    def compile_all(progress: object) -> bool:
        compiled.append(1)
        return waits.wait(60)  # the other start reports that it waits

    def progress(fraction: float, doing: str) -> None:
        if doing.startswith(precompile.WAITING):
            waits.set()
        else:
            both.wait(60)

    monkeypatch.setattr(precompile, "_compile_in_subprocesses", compile_all)
    starts = [threading.Thread(target=precompile.compile_missing, args=(progress,)) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert compiled == [1] and marker.exists()


def test_main_without_names_compiles_what_is_missing(marker, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["precompile"])
    monkeypatch.setattr(precompile, "_compile_in_subprocesses", lambda progress: True)
    precompile.main()
    assert marker.exists() and "compiling kernels" in capsys.readouterr().out


def test_failed_compilation_leaves_no_marker(marker, monkeypatch) -> None:
    monkeypatch.setattr(precompile, "KERNELS", {"forward": None, "no kernel of this name": None})
    precompile.compile_missing(lambda fraction, doing: None)
    assert not marker.exists()


@pytest.mark.parametrize("command", ["", "never ends"])
def test_processes_that_cannot_start_or_never_end_are_given_up(command, marker, tmp_path, monkeypatch) -> None:
    """The first occurs in an embedded Python, where `sys.executable` is no interpreter."""
    if command:
        program = tmp_path / "program"
        program.write_text("#!/bin/sh\nexec sleep 1000\n")
        program.chmod(0o700)
        command = str(program)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[-1])
    monkeypatch.setattr(precompile.sys, "executable", command)
    monkeypatch.setattr(precompile, "COMPILE_TIMEOUT_S", 0.0)
    precompile.compile_missing(lambda fraction, doing: None)
    assert len(started) == (len(precompile.KERNELS) if command else 0)
    assert all(child.returncode is not None for child in started)
    assert not marker.exists()
