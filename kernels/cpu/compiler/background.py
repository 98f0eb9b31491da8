"""Kernels that a process compiles while this one uses them: it takes over each stage as soon as it is compiled."""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from plait.host.child_process import ChildProcess
from plait.kernels.cpu.compiler.library import KernelLibrary

COMPILE_TIMEOUT_S = 600.0  # compiling takes four seconds on an idle machine
REPORT_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 5.0  # until a killed process has ended
EXPECTED_S = 1.5, 6.0  # until kernels can be called, and until they are optimized: for the progress that is shown
COMPILING = "compiling kernels, once (a few seconds)"
QUICK, OPTIMIZED, ERROR = "quick", "optimized", "error"  # stages, and the name of a message that is no object file
MAX_LINE_BYTES = 200
CompileProgress = Callable[[float, str], None]  # (fraction done, 0 to 1; current activity)


class BackgroundCompilation:
    """A process that compiles `libraries`, and a thread that installs what it sends.

    If the process fails, kernels that were compiled quickly stay in use, and standard error says so. It ends with this
    process.
    """

    def __init__(self, libraries: Sequence[KernelLibrary]) -> None:
        self._libraries = {library.name: library for library in libraries}
        self._unfinished = set(self._libraries)
        self._is_usable, self._has_ended = threading.Event(), threading.Event()
        self._is_closed, self._error = False, ""
        self._note_usable()
        module, pipe, null = "plait.kernels.cpu.precompile", subprocess.PIPE, subprocess.DEVNULL
        try:
            self._child = ChildProcess(module, "--child", *self._libraries, stdout=pipe, stderr=null)
        except OSError:
            self._is_usable.set()
            self._has_ended.set()
            return
        atexit.register(self.close)
        threading.Thread(target=self._run, name="plait-compile", daemon=True).start()

    def wait(self, progress: CompileProgress, until_optimized: bool) -> None:
        """Waits until all kernels can be called, or are optimized, or the process has ended."""
        begin, event = time.monotonic(), self._has_ended if until_optimized else self._is_usable
        expected_s = EXPECTED_S[until_optimized]
        if not event.is_set():
            progress(0.0, COMPILING)
        while not event.wait(REPORT_INTERVAL_S):
            elapsed = time.monotonic() - begin
            progress(min(elapsed / expected_s, 0.99), f"{COMPILING}: {elapsed:.0f} s")

    def close(self) -> None:
        """Ends the process at once; idempotent."""
        self._is_closed = True
        self._child.kill()
        self._has_ended.wait(STOP_TIMEOUT_S)

    def _run(self) -> None:
        """Receives in a thread; whatever happens there, nobody waits for it afterwards."""
        try:
            self._receive()
        finally:
            self._is_usable.set()
            self._has_ended.set()
            atexit.unregister(self.close)

    def _receive(self) -> None:
        """Installs what the process sends until it ends."""
        assert self._child.stdout is not None
        try:
            with self._child.killed_after(COMPILE_TIMEOUT_S):
                while (message := _read_message(self._child.stdout)) is not None:
                    self._take(*message)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: of LLVM, which cannot load the code
            self._error = str(error)
        self._child.end(0.0)
        if self._unfinished and not self._is_closed and all(library.is_loaded for library in self._libraries.values()):
            reason = self._error or f"the process that compiles has ended ({self._child.status()})"
            print(f"plait: kernels are not optimized, steps take a tenth longer: {reason}", file=sys.stderr, flush=True)

    def _take(self, name: str, stage: str, content: bytes) -> None:
        if name == ERROR:
            self._error = content.decode(errors="replace")
            return
        self._libraries[name].install(content)
        if stage == OPTIMIZED:
            self._unfinished.discard(name)
        self._note_usable()

    def _note_usable(self) -> None:
        if all(library.is_loaded for library in self._libraries.values()):
            self._is_usable.set()


def _read_message(pipe: IO[bytes]) -> tuple[str, str, bytes] | None:
    """Returns name, stage and content of the next message; None at the end. Raises ValueError for anything else."""
    line = pipe.readline(MAX_LINE_BYTES)
    if not line:
        return None
    name, stage, size = line.decode().split()
    content = pipe.read(int(size))
    if len(content) != int(size):
        raise ValueError("the process that compiles ended while it sent kernels")
    return name, stage, content
