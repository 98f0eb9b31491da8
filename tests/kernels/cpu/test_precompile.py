"""Compiling the kernels ahead, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from plait.kernels.cpu import precompile
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.parallel import thread_pool


@pytest.fixture
def missing(tmp_path, monkeypatch):
    """A small library that is not in the cache, the only one to compile."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    library = KernelLibrary("threads", thread_pool.run_step, thread_pool.serve_steps)
    monkeypatch.setattr(precompile, "KERNELS", {library.name: library})
    return library


def test_missing_kernels_are_compiled_once(missing, monkeypatch) -> None:
    """The process compiles all kernels; those of the decoder take it a few seconds."""
    begins: list[str] = []
    for _ in range(2):
        precompile.compile_missing(
            lambda fraction, doing: begins.append(doing) if doing == precompile.COMPILING else None
        )
    assert len(begins) == 1 and not missing.is_missing
    monkeypatch.setattr(KernelLibrary, "_compile", None)  # would raise
    assert all(missing.load().values())


def test_of_two_concurrent_starts_only_one_compiles(missing, monkeypatch) -> None:
    compiled, both, waits = [], threading.Barrier(2), threading.Event()

    def compile_all(progress: object) -> None:
        compiled.append(1)
        assert waits.wait(60)  # the other start reports that it waits
        missing.load()

    def progress(fraction: float, doing: str) -> None:
        if doing.startswith(precompile.WAITING):
            waits.set()
        else:
            both.wait(60)

    monkeypatch.setattr(precompile, "_compile_in_subprocess", compile_all)
    starts = [threading.Thread(target=precompile.compile_missing, args=(progress,)) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert compiled == [1] and not missing.is_missing


def test_main_compiles_what_is_missing(missing, monkeypatch, capsys) -> None:
    monkeypatch.setattr(precompile.sys, "argv", ["precompile"])
    monkeypatch.setattr(precompile, "_compile_in_subprocess", lambda progress: missing.load())
    precompile.main()
    assert not missing.is_missing and "compiling kernels" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["", "fails", "never ends"])
def test_a_process_that_cannot_start_fails_or_never_ends_is_given_up(command, missing, tmp_path, monkeypatch) -> None:
    """The first occurs in an embedded Python, where `sys.executable` is no interpreter."""
    if command:
        program = tmp_path / "program"
        program.write_text("#!/bin/sh\nexit 1\n" if command == "fails" else "#!/bin/sh\nexec sleep 1000\n")
        program.chmod(0o700)
        monkeypatch.setattr(precompile, "COMPILE_TIMEOUT_S", 60.0 if command == "fails" else 0.1)
        command = str(program)
    monkeypatch.setattr(precompile, "REPORT_INTERVAL_S", 0.1)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[-1])
    monkeypatch.setattr(precompile.sys, "executable", command)
    precompile.compile_missing(lambda fraction, doing: None)
    assert len(started) == (1 if command else 0)
    assert all(child.returncode is not None for child in started)
    assert missing.is_missing and all(missing.load().values()), "the first call compiles"


def test_a_compiling_process_ends_with_its_parent() -> None:
    """Its standard input ends."""
    reader, writer = os.pipe()
    os.close(writer)
    code = "import os\nfrom plait.kernels.cpu import precompile\nprecompile._exit_with_parent()\nos._exit(5)"
    child = subprocess.Popen([precompile.sys.executable, "-c", code], stdin=reader)
    os.close(reader)
    assert child.wait(60) == 1
