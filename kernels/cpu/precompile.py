"""Compiles the cached kernels ahead of their first call, each in a separate process.

    python -m plait.kernels.cpu.precompile              compiles what is missing, as the first start of a runtime does
    python -m plait.kernels.cpu.precompile forward      compiles one kernel and caches it

Separate processes compile in parallel, and the compiler's memory is freed with them. Standard input of each is a pipe
from the process that started it. The pipe ends with that process, however it ends; then the compiling process exits.
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
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
from numba import types
from numba.core import event

from plait.kernels.cpu import decoder_kernels, isa
from plait.kernels.cpu.compile_cache import SOURCE_HASH
from plait.kernels.cpu.parallel import thread_pool

COMPILE_TIMEOUT_S = 600.0  # compiling takes half a minute on an idle machine
REPORT_INTERVAL_S = 1.0
NUM_FUNCTIONS = 165  # about as many functions as all kernels consist of; only for the progress that is shown
COMPILING = "compiling kernels, once (half a minute)"
WAITING = "compiling kernels, which another process does"
CompileProgress = Callable[[float, str], None]  # (fraction done, 0 to 1; current activity)
LAUNCH_SIGNATURE = (types.int64, types.Array(types.int64, 2, "C"), types.int64, types.int64)
KERNELS: dict[str, Callable[[], object]] = {
    "forward": lambda: decoder_kernels.forward.address,
    "compute_logits": lambda: (
        decoder_kernels.compute_logits.address,
        thread_pool.launch.compile(LAUNCH_SIGNATURE),
        thread_pool.compiled_worker(),
    ),
}


def compile_missing(progress: CompileProgress) -> None:
    """Compiles the kernels that are not in the cache yet, or waits for a process that does.

    Calls `progress` before it begins and then about once per second. If a process fails, takes too long or cannot be
    started (where Python is embedded in another program), the kernel is compiled by its first call, which reports any
    error.
    """
    marker = _marker_path()
    if marker is None or marker.exists():
        return
    progress(0.0, COMPILING)
    with _compile_lock(marker.with_suffix(".lock"), progress):
        if not marker.exists() and _compile_in_subprocesses(progress):
            with contextlib.suppress(OSError):  # the folder cannot be written: the next start tries again
                marker.touch()


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


def _compile_in_subprocesses(progress: CompileProgress) -> bool:
    """Compiles each kernel in a process; returns whether all succeeded. No process outlives the call."""
    command = [sys.executable, "-P", "-m", "plait.kernels.cpu.precompile", "--report"]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for name in KERNELS:
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            children.append(subprocess.Popen([*command, name], stdin=pipe, stdout=pipe, stderr=null))
        return _wait_for(children, progress)
    except OSError:
        return False
    finally:
        for child in children:
            with child:  # closes the pipes
                child.kill()


def _wait_for(children: list[subprocess.Popen[bytes]], progress: CompileProgress) -> bool:
    """Returns whether all children succeed before the timeout. A child writes a byte per compiled function."""
    outputs = [child.stdout.fileno() for child in children if child.stdout is not None]
    for output in outputs:
        os.set_blocking(output, False)
    start, num_compiled = time.monotonic(), 0
    while (elapsed := time.monotonic() - start) < COMPILE_TIMEOUT_S:
        for output in outputs:
            with contextlib.suppress(BlockingIOError):
                num_compiled += len(os.read(output, 4096))
        progress(min(num_compiled / NUM_FUNCTIONS, 0.99), f"{COMPILING}: {num_compiled} functions, {elapsed:.0f} s")
        if _all_ended(children, REPORT_INTERVAL_S):
            return not any(child.returncode for child in children)
    return False


def _all_ended(children: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Returns whether all children end, with success or not, within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    try:
        for child in children:
            child.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def _marker_path() -> Path | None:
    """Returns the path of a file that exists once all kernels are cached, for these sources, compiler and processor.

    None if there is no cache.
    """
    folder = thread_pool.launch.stats.cache_path
    if folder is None:
        return None
    key = (SOURCE_HASH, numba.__version__, sys.implementation.cache_tag, *isa.compile_target())
    return Path(folder) / f"kernels-{zlib.crc32(repr(key).encode()):08x}.kept"


class _FunctionCounter(event.Listener):  # type: ignore[misc]
    """Writes a byte to standard output for each function that numba has compiled."""

    def on_start(self, event: event.Event) -> None: ...

    def on_end(self, event: event.Event) -> None:
        with contextlib.suppress(OSError):  # the reader has ended, and so will this process
            os.write(sys.stdout.fileno(), b".")


def _exit_with_parent() -> None:
    """Ends this process when standard input ends, which means that the process that started it has ended."""
    while os.read(sys.stdin.fileno(), 64):
        continue
    os._exit(1)


def _print_progress(fraction: float, doing: str) -> None:
    print(f"{doing} [{fraction:.0%}]", flush=True)


def main() -> None:
    """Compiles the kernels named on the command line, or those that are missing.

    With `--report`, which `compile_missing` passes, the process reports functions and ends with its standard input.
    """
    names = sys.argv[1:]
    if names[:1] == ["--report"]:
        names = names[1:]
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        event.register("numba:compile", _FunctionCounter())
    if not names:
        compile_missing(_print_progress)
    if names:
        gc.disable()  # the process ends when it has compiled: searching for cycles would take a tenth of its time
    for name in names:
        KERNELS[name]()


if __name__ == "__main__":
    main()
