"""Compiles the kernels in a separate process: at first quickly, so that a runtime can answer, then optimized.

    python -m plait.kernels.cpu.precompile              compiles what is missing
    python -m plait.kernels.cpu.precompile --child      does it, and sends each object file to standard output

The compiler's memory is freed with its process, and the runtime goes on loading the model meanwhile. Standard input of
the process is a pipe from the one that started it. The pipe ends with that process, however it ends; then the compiling
process exits. An object file is sent as a line "KERNELS STAGE BYTES" and its bytes, an error as "error 0 BYTES".
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from plait.host.child_process import ChildProcess
from plait.host.owner import watch_owner
from plait.host.private_file import open_private
from plait.kernels.cpu import decoder_kernels
from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.parallel import thread_pool

LOWEST_PRIORITY = 19
KERNELS: dict[str, KernelLibrary] = {
    library.name: library for library in (thread_pool.LIBRARY, decoder_kernels.LIBRARY)
}  # fmt: skip


def load_kernels(progress: CompileProgress, wait_until_optimized: bool = False) -> None:
    """Makes the kernels callable: from the cache, or compiled by a process, which goes on to optimize them.

    The optimized kernels take over between two calls; `wait_until_optimized` waits for them. Calls `progress` before
    it begins to compile and then about once per second. If the process fails, takes too long or cannot be started
    (where Python is embedded in another program), the kernels are compiled here; this reports any error.
    """
    missing = [library for library in KERNELS.values() if not library.is_loaded and not library.load_cached()]
    if missing:
        BackgroundCompilation(missing).wait(progress, wait_until_optimized)
    for library in KERNELS.values():
        library.load()


@contextlib.contextmanager
def _compile_lock() -> Iterator[None]:
    """Holds a lock among this machine's processes; the system releases the lock of a process that ends."""
    folder = object_code.cache_folder()
    with contextlib.ExitStack() as stack:
        if folder is not None:
            with contextlib.suppress(OSError):  # if no file can be locked, each process compiles for itself
                lock = open_private(folder / "kernels.lock", os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_in_stages(names: list[str]) -> None:
    """Sends the object files of these kernels to standard output, those compiled quickly before the optimized ones."""
    libraries = [KERNELS[name] for name in names]
    for library in libraries:
        _send(library.name, QUICK, library.cached(quick=True) or library.compile_quick())
    with contextlib.suppress(OSError):
        os.nice(LOWEST_PRIORITY)  # steps run meanwhile, whose threads wait for each other
    with _compile_lock():
        for library in libraries:
            _send(library.name, OPTIMIZED, library.cached() or library.compile_optimized())


def _send(name: str, stage: str, content: bytes) -> None:
    sys.stdout.buffer.write(f"{name} {stage} {len(content)}\n".encode() + content)
    sys.stdout.buffer.flush()


def _exit() -> None:
    """Ends this process once it is not within writing a file of the cache."""
    with object_code.WRITING:
        os._exit(1)


def _print_progress(fraction: float, doing: str) -> None:
    print(f"{doing} [{fraction:.0%}]", flush=True)


def main() -> None:
    """Compiles the kernels that are missing; with `--child NAME...`, these, as `BackgroundCompilation` starts it."""
    if sys.argv[1:2] != ["--child"]:
        load_kernels(_print_progress, wait_until_optimized=True)
        return
    watch_owner(_exit)
    gc.disable()  # the process ends when it has compiled: searching for cycles would take a tenth of its time
    try:
        compile_in_stages(sys.argv[2:])
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        _send(ERROR, "0", f"{type(error).__name__}: {error}".encode())


# -- background -----------------------------------------------------------------------------------
# Kernels that a process compiles while this one uses them: it takes over each stage as soon as it is compiled.

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


if __name__ == "__main__":
    main()
