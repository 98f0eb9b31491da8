"""The kernels that are compiled once and kept on disk: whether that was done, and doing it in processes of their own.

    python -m plait.kernels.cpu.precompile              compiles what is missing, as the first runtime does
    python -m plait.kernels.cpu.precompile forward      compiles one kernel, and keeps it

Side by side they take less time, and what a compiler leaves behind in memory goes with its process.

Knows: the names and types of kernels. Must not know: what they compute.
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

from plait.kernels.cpu import decoder_kernels, isa
from plait.kernels.cpu.compile_cache import SOURCE_HASH

COMPILE_TIMEOUT_S = 600.0  # for compilers that take half a minute to two minutes on a free machine
ARGS_TYPE = types.Array(types.int64, 2, "C")
KERNELS = {
    "forward": (decoder_kernels.forward, (ARGS_TYPE, types.int64)),
    "compute_logits": (decoder_kernels.compute_logits, (ARGS_TYPE, types.int64, types.int64, types.int64)),
}


def compile_missing(progress: Callable[[str], None]) -> None:
    """Compiles what was not compiled on this machine before, or waits for a process that does.

    What fails, takes minutes or cannot be started (where Python is part of another program) is left to its first call,
    which tells why.
    """
    marker = _marker_path()
    if marker is None or marker.exists():
        return
    progress("compiling kernels for this processor, which takes up to two minutes once")
    with _compile_lock(marker.with_suffix(".lock")):
        if not marker.exists() and _compile_in_subprocesses():
            with contextlib.suppress(OSError):  # a folder that cannot be written: the next start compiles again
                marker.touch()


@contextlib.contextmanager
def _compile_lock(path: Path) -> Iterator[None]:
    """Among the processes of this machine; the lock of one that ends in any way is free again."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where no file can be made or locked each goes on by itself
            fcntl.flock(held.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


def _compile_in_subprocesses() -> bool:
    """Whether a process for each kernel came to its end; none is left behind, whatever happens here."""
    command, quiet = [sys.executable, "-P", "-m", "plait.kernels.cpu.precompile"], subprocess.DEVNULL
    children: list[subprocess.Popen[bytes]] = []
    until = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        for name in KERNELS:
            children.append(subprocess.Popen([*command, name], stdin=quiet, stdout=quiet, stderr=quiet))
        codes = [child.wait(until - time.monotonic()) for child in children]
        return not any(codes)
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        for child in children:
            child.kill()
            child.wait()


def _marker_path() -> Path | None:
    """A file beside the kept kernels that is there once all are: of these sources and compilers, for this processor.

    None where nothing is kept.
    """
    folder = decoder_kernels.forward.stats.cache_path
    if folder is None:
        return None
    made_by = (SOURCE_HASH, numba.__version__, sys.implementation.cache_tag, *isa.compile_target())
    return Path(folder) / f"kernels-{zlib.crc32(repr(made_by).encode()):08x}.kept"


def main() -> None:
    """Compiles the kernels that are named as arguments, or those that are missing."""
    if not sys.argv[1:]:
        compile_missing(print)
    for name in sys.argv[1:]:
        function, signature = KERNELS[name]
        function.compile(signature)


if __name__ == "__main__":
    main()
