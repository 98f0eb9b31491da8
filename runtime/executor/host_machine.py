"""What this machine is, told without torch: whether it may have a GPU, its threads, its memory.

Knows: what the system says. Must not know: models, torch, which device is taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

# Without one of these Linux has no GPU that torch would call "cuda": NVIDIA's, Jetson's, AMD's, Windows' own below WSL.
GPU_DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")


def may_have_gpu() -> bool:
    """False where there surely is none; else torch has to be asked."""
    if platform.system() == "Linux":
        return any(Path(node).exists() for node in GPU_DEVICE_NODES)
    return True


def num_threads() -> int:
    """Threads for one computation: OMP_NUM_THREADS, else one for each core that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if given.isdigit() and int(given) > 0:
        return int(given)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    return len({_physical_core(processor) for processor in allowed})


def _physical_core(processor: int) -> str:
    """What names the core that a processor is a thread of; the processor itself where the system does not tell."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)


def host_kv_cache_budget() -> int:
    """Bytes a KV cache may take in the computer's memory when nothing was said: an eighth of it, 1 GiB at most."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // 8, 1 << 30)


def trim_heap() -> None:
    """Returns freed memory to the system, after something large was built: glibc keeps what lies below a live piece."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library keeps less
        ctypes.CDLL(None).malloc_trim(0)
