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

from plait.kernels import cpu_features, cpu_step
from plait.kernels.cpu_cache import STAMP

PATIENCE_S = 600.0  # for compilers that take half a minute to two minutes on a free machine
PLAN = types.Array(types.int64, 2, "C")
KERNELS = {
    "forward": (cpu_step.forward, (PLAN, types.int64)),
    "project": (cpu_step.project, (PLAN, types.int64, types.int64, types.int64)),
}


def compile_missing(progress: Callable[[str], None]) -> None:
    """Compiles what was not compiled on this machine before, or waits for a process that does.

    What fails, takes minutes or cannot be started (where Python is part of another program) is left to its first call,
    which tells why.
    """
    mark = _mark()
    if mark is None or mark.exists():
        return
    progress("compiling kernels for this processor, which takes up to two minutes once")
    with _one_at_a_time(mark.with_suffix(".lock")):
        if not mark.exists() and _compiled_by_children():
            with contextlib.suppress(OSError):  # a folder that cannot be written: the next start compiles again
                mark.touch()


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Among the processes of this machine; the lock of one that ends in any way is free again."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where no file can be made or locked each goes on by itself
            fcntl.flock(held.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


def _compiled_by_children() -> bool:
    """Whether a process for each kernel came to its end; none is left behind, whatever happens here."""
    command, quiet = [sys.executable, "-P", "-m", "plait.kernels.cpu.precompile"], subprocess.DEVNULL
    children: list[subprocess.Popen[bytes]] = []
    until = time.monotonic() + PATIENCE_S
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


def _mark() -> Path | None:
    """A file beside the kept kernels that is there once all are: of these sources and compilers, for this processor.

    None where nothing is kept.
    """
    folder = cpu_step.forward.stats.cache_path
    if folder is None:
        return None
    made_by = (STAMP, numba.__version__, sys.implementation.cache_tag, *cpu_features.target())
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
