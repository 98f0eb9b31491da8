"""Queries the host without importing torch: possible GPUs, threads, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

# Device nodes without which Linux has no GPU that torch calls "cuda": NVIDIA, Jetson, AMD, Windows below WSL.
GPU_DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")


def may_have_gpu() -> bool:
    """False if this machine certainly has no GPU; otherwise only torch can tell."""
    if platform.system() == "Linux":
        return any(Path(node).exists() for node in GPU_DEVICE_NODES)
    return True


def num_threads() -> int:
    """Threads for one computation: OMP_NUM_THREADS, else one per physical core that this process may use."""
    omp_num_threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if omp_num_threads.isdigit() and int(omp_num_threads) > 0:
        return int(omp_num_threads)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_physical_core(processor) for processor in os.sched_getaffinity(0)})


def _physical_core(processor: int) -> str:
    """A name of the core that runs this logical processor; the processor's number if the system does not tell."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)


def host_kv_cache_budget() -> int:
    """Default KV cache size in bytes: an eighth of the host's memory, at most 1 GiB."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total_bytes // 8, 1 << 30)


def trim_heap() -> None:
    """Returns freed memory to the system; glibc alone keeps what lies below a live allocation."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # C libraries without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
