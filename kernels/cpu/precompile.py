"""Compiles the kernels in a separate process: at first quickly, so that a runtime can answer, then optimized.

    python -m plait.kernels.cpu.precompile              compiles what is missing
    python -m plait.kernels.cpu.precompile --child      does it, and sends each object file to standard output

The compiler's memory is freed with its process, and the runtime goes on loading the model meanwhile. Standard input of
the process is a pipe from the one that started it. The pipe ends with that process, however it ends; then the compiling
process exits. An object file is sent as a line "KERNELS STAGE BYTES" and its bytes, an error as "error 0 BYTES".
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
from collections.abc import Iterator

from plait.host.owner import watch_owner
from plait.host.private_file import open_private
from plait.kernels.cpu import decoder_kernels
from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.background import ERROR, OPTIMIZED, QUICK, BackgroundCompilation, CompileProgress
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


if __name__ == "__main__":
    main()
