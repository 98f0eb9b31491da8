"""Compiles the kernels ahead of their first call, in a separate process.

    python -m plait.kernels.cpu.precompile              compiles what is missing, as the first start of a runtime does
    python -m plait.kernels.cpu.precompile --child      compiles in this process and caches the code

The compiler's memory is freed with its process, and the runtime goes on loading the model meanwhile. Standard input of
the process is a pipe from the one that started it. The pipe ends with that process, however it ends; then the compiling
process exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from plait.kernels.cpu import decoder_kernels
from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.parallel import thread_pool

COMPILE_TIMEOUT_S = 600.0  # compiling takes five seconds on an idle machine
REPORT_INTERVAL_S = 1.0
EXPECTED_S = 6.0  # only for the progress that is shown
COMPILING = "compiling kernels, once (a few seconds)"
WAITING = "compiling kernels, which another process does"
CompileProgress = Callable[[float, str], None]  # (fraction done, 0 to 1; current activity)
KERNELS: dict[str, KernelLibrary] = {
    library.name: library for library in (decoder_kernels.LIBRARY, thread_pool.LIBRARY)
}  # fmt: skip


def compile_missing(progress: CompileProgress) -> None:
    """Compiles the kernels that are not in the cache yet, or waits for a process that does.

    Calls `progress` before it begins and then about once per second. If the process fails, takes too long or cannot be
    started (where Python is embedded in another program), the kernels are compiled by their first call, which reports
    any error.
    """
    if (folder := object_code.cache_folder()) is None or not _is_any_missing():
        return
    progress(0.0, COMPILING)
    with _compile_lock(folder / "kernels.lock", progress):
        if _is_any_missing():
            _compile_in_subprocess(progress)


def _is_any_missing() -> bool:
    return any(library.is_missing for library in KERNELS.values())


@contextlib.contextmanager
def _compile_lock(path: Path, progress: CompileProgress) -> Iterator[None]:
    """Holds a lock among this machine's processes; the system releases the lock of a process that ends."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # if no file can be locked, each process compiles for itself
            file, start = stack.enter_context(path.open("a")), time.monotonic()
            while not _try_lock(file.fileno()):
                progress(0.0, f"{WAITING}: {time.monotonic() - start:.0f} s")
                time.sleep(REPORT_INTERVAL_S)
        yield


def _try_lock(fd: int) -> bool:
    """Locks the file and returns True, or returns False if another process holds the lock. Raises OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile_in_subprocess(progress: CompileProgress) -> None:
    """Compiles the kernels in a process, which does not outlive the call."""
    command = [sys.executable, "-P", "-m", "plait.kernels.cpu.precompile", "--child"]
    null = subprocess.DEVNULL
    with (
        contextlib.suppress(OSError),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null) as child,
    ):
        try:
            _wait_for(child, progress)
        finally:
            child.kill()


def _wait_for(child: subprocess.Popen[bytes], progress: CompileProgress) -> None:
    """Waits until the child ends, or until the timeout."""
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < COMPILE_TIMEOUT_S:
        progress(min(elapsed / EXPECTED_S, 0.99), f"{COMPILING}: {elapsed:.0f} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(REPORT_INTERVAL_S)
            return


def _exit_with_parent() -> None:
    """Ends this process when standard input ends, which means that the process that started it has ended."""
    while os.read(sys.stdin.fileno(), 64):
        continue
    os._exit(1)


def _print_progress(fraction: float, doing: str) -> None:
    print(f"{doing} [{fraction:.0%}]", flush=True)


def main() -> None:
    """Compiles the kernels that are missing: with `--child`, as `compile_missing` starts it, in this process."""
    if sys.argv[1:] != ["--child"]:
        compile_missing(_print_progress)
        return
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    gc.disable()  # the process ends when it has compiled: searching for cycles would take a tenth of its time
    for library in KERNELS.values():
        library.load()


if __name__ == "__main__":
    main()
