"""Compiling the kernels ahead, in a process of its own: at first quickly, then optimized."""

from __future__ import annotations

import os
import subprocess
import threading
from types import SimpleNamespace

import odd_files
import pytest

from plait.kernels.cpu import precompile
from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.parallel import thread_pool

FUNCTIONS = (thread_pool.run_step, thread_pool.serve_steps)


@pytest.fixture
def missing(tmp_path, monkeypatch):
    """A small library that is not in the cache, the only one to compile."""
    monkeypatch.setenv("PLAIT_KERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile, "REPORT_INTERVAL_S", 0.1)
    library = KernelLibrary("threads", *FUNCTIONS)
    monkeypatch.setattr(precompile, "KERNELS", {library.name: library})
    return library


def no_progress(fraction: float, doing: str) -> None:
    """Shows nothing."""


def test_missing_kernels_are_compiled_once(missing, monkeypatch) -> None:
    """The process compiles all kernels; those of the decoder take it a few seconds."""
    shown: list[str] = []
    precompile.load_kernels(lambda fraction, doing: shown.append(doing), wait_until_optimized=True)
    assert shown[0] == precompile.COMPILING and not missing.is_missing and all(missing.load().values())
    assert [path.suffix for path in object_code.cache_folder().glob("*threads*")] == [".o"], "only the optimized code"
    monkeypatch.setattr(precompile, "KERNELS", {"threads": KernelLibrary("threads", *FUNCTIONS)})
    monkeypatch.setattr(precompile, "BackgroundCompilation", None)  # would raise
    precompile.load_kernels(lambda fraction, doing: pytest.fail(doing))


def test_optimized_kernels_replace_those_compiled_quickly(missing) -> None:
    compilation = _held_after_quick(missing)
    quick = missing.load()
    compilation.finish()
    assert compilation.parent._has_ended.wait(60)
    assert missing.load().keys() == quick.keys() and set(missing.load().values()).isdisjoint(quick.values())


def test_quick_kernels_of_a_process_that_ended_early_serve_the_next_start(missing, monkeypatch) -> None:
    KernelLibrary("threads", *FUNCTIONS).compile_quick()
    begun = []
    monkeypatch.setattr(precompile, "BackgroundCompilation", lambda libraries: begun.append(libraries) or ended)
    ended = SimpleNamespace(wait=lambda progress, until_optimized: None)
    precompile.load_kernels(lambda fraction, doing: pytest.fail(doing))
    assert begun == [[missing]] and missing.is_loaded and missing.is_missing


def test_a_failure_while_optimizing_leaves_the_quick_kernels_and_is_reported(missing, capfd) -> None:
    compilation = _held_after_quick(missing)
    quick = missing.load()
    compilation.send(b"error 0 16\nMemoryError: all")
    compilation.finish(is_complete=False)
    assert compilation.parent._has_ended.wait(60)
    assert missing.load() == quick
    assert "kernels are not optimized" in (text := capfd.readouterr().err) and "MemoryError" in text


@pytest.mark.parametrize("message", [b"threads quick 99\nabc", b"threads quick", b"nonsense\n", b"x" * 500])
def test_what_is_no_object_file_is_not_installed(message, missing) -> None:
    compilation = _Held(missing)
    compilation.send(message)
    compilation.finish(is_complete=False)
    assert compilation.parent._has_ended.wait(60) and not missing.is_loaded


def test_of_two_concurrent_processes_only_one_optimizes(missing, monkeypatch) -> None:
    optimized, sent = [], []
    compile_optimized = KernelLibrary.compile_optimized
    monkeypatch.setattr(KernelLibrary, "compile_optimized", lambda self: optimized.append(1) or compile_optimized(self))
    monkeypatch.setattr(precompile, "_send", lambda name, stage, code: sent.append(stage))
    monkeypatch.setattr(precompile.os, "nice", lambda increment: 0)
    both = [threading.Thread(target=precompile.compile_in_stages, args=(["threads"],)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(optimized) == 1 and sorted(sent) == ["optimized"] * 2 + ["quick"] * 2


@pytest.mark.timeout(20)  # a FIFO that is waited for
@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_whatever_lies_in_place_of_the_lock_is_not_waited_for(missing, kind) -> None:
    odd_files.put(kind, object_code.cache_folder() / "kernels.lock")
    with precompile._compile_lock():
        pass
    assert (object_code.cache_folder() / "kernels.lock").is_file() == (kind != "folder")


def test_without_a_cache_kernels_come_from_the_process(missing, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLAIT_KERNEL_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(KernelLibrary, "compile_optimized", None)  # would raise in this process
    precompile.load_kernels(no_progress, wait_until_optimized=True)
    assert missing.is_loaded and list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_main_compiles_what_is_missing(missing, monkeypatch, capsys) -> None:
    monkeypatch.setattr(precompile.sys, "argv", ["precompile"])
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
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[-1])
    monkeypatch.setattr(precompile.sys, "executable", command)
    precompile.load_kernels(no_progress)
    assert len(started) == (1 if command else 0)
    assert all(child.returncode is not None for child in started)
    assert all(missing.load().values()) and not missing.is_missing, "compiled in this process"


def test_a_compiling_process_ends_with_its_parent() -> None:
    """Its standard input ends."""
    reader, writer = os.pipe()
    os.close(writer)
    code = "import time\nfrom plait.kernels.cpu import precompile as p\np.watch_owner(p._exit)\ntime.sleep(60)"
    child = subprocess.Popen([precompile.sys.executable, "-c", code], stdin=reader)
    os.close(reader)
    assert child.wait(60) == 1


class _Held:
    """A compilation whose process sends what the test says: `cat` of a FIFO."""

    def __init__(self, library: KernelLibrary) -> None:
        self.library, folder = library, object_code.cache_folder().parent
        fifo, program = folder / "fifo", folder / "program"
        os.mkfifo(fifo)
        program.write_text(f"#!/bin/sh\nexec cat {fifo}\n")
        program.chmod(0o700)
        executable, precompile.sys.executable = precompile.sys.executable, str(program)
        try:
            self.parent = precompile.BackgroundCompilation([library])
        finally:
            precompile.sys.executable = executable
        self._pipe = fifo.open("wb", buffering=0)

    def send(self, content: bytes) -> None:
        self._pipe.write(content)

    def send_code(self, stage: str, code: bytes) -> None:
        self.send(f"{self.library.name} {stage} {len(code)}\n".encode() + code)

    def finish(self, is_complete: bool = True) -> None:
        """Sends the optimized code, if the compilation `is_complete`, and ends the process."""
        if is_complete:
            self.send_code("optimized", KernelLibrary("threads", *FUNCTIONS).compile_optimized())
        self._pipe.close()


def _held_after_quick(library: KernelLibrary) -> _Held:
    held = _Held(library)
    held.send_code("quick", KernelLibrary("threads", *FUNCTIONS).compile_quick())
    held.parent.wait(no_progress, until_optimized=False)
    assert library.is_loaded and not held.parent._has_ended.is_set()
    return held
