"""Compiles the cached kernels ahead of their first call, each in a process of its own.

    python -m plait.kernels.cpu.precompile              compiles what is missing, as the first start of a runtime does
    python -m plait.kernels.cpu.precompile forward      compiles one kernel and caches it

Separate processes compile in parallel, and the compiler's memory is freed with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
from numba import types

from plait.kernels.cpu import decoder_kernels, isa, threads
from plait.kernels.cpu.compile_cache import SOURCE_HASH

COMPILE_TIMEOUT_S = 600.0  # compiling takes half a minute on an idle machine
LAUNCH_SIGNATURE = (types.int64, types.Array(types.int64, 2, "C"), types.int64)
KERNELS: dict[str, Callable[[], object]] = {
    "forward": lambda: decoder_kernels.forward.address,
    "compute_logits": lambda: (decoder_kernels.compute_logits.address, threads.launch.compile(LAUNCH_SIGNATURE)),
}


def compile_missing(progress: Callable[[str], None]) -> None:
    """Compiles the kernels that are not in the cache yet, or waits for a process that does.

    If a process fails, takes too long or cannot be started (where Python is embedded in another program), the kernel
    is compiled by its first call, which reports any error.
    """
    marker = _marker_path()
    if marker is None or marker.exists():
        return
    progress("compiling kernels for this processor, once: about half a minute")
    with _compile_lock(marker.with_suffix(".lock")):
        if not marker.exists() and _compile_in_subprocesses():
            with contextlib.suppress(OSError):  # the folder cannot be written: the next start tries again
                marker.touch()


@contextlib.contextmanager
def _compile_lock(path: Path) -> Iterator[None]:
    """Holds a lock among this machine's processes; the system releases the lock of a process that ends."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # if no file can be locked, each process compiles for itself
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


def _compile_in_subprocesses() -> bool:
    """Compiles each kernel in a process; returns whether all succeeded. No process outlives the call."""
    command, null = [sys.executable, "-P", "-m", "plait.kernels.cpu.precompile"], subprocess.DEVNULL
    children: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        for name in KERNELS:
            children.append(subprocess.Popen([*command, name], stdin=null, stdout=null, stderr=null))
        codes = [child.wait(deadline - time.monotonic()) for child in children]
        return not any(codes)
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        for child in children:
            child.kill()
            child.wait()


def _marker_path() -> Path | None:
    """Returns the path of a file that exists once all kernels are cached, for these sources, compiler and processor.

    None if there is no cache.
    """
    folder = threads.launch.stats.cache_path
    if folder is None:
        return None
    key = (SOURCE_HASH, numba.__version__, sys.implementation.cache_tag, *isa.compile_target())
    return Path(folder) / f"kernels-{zlib.crc32(repr(key).encode()):08x}.kept"


def main() -> None:
    """Compiles the kernels named on the command line, or those that are missing."""
    if not sys.argv[1:]:
        compile_missing(print)
    for name in sys.argv[1:]:
        KERNELS[name]()


if __name__ == "__main__":
    main()
