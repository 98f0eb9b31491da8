"""Queries the host without importing torch: possible GPUs, threads, memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path

# Device nodes without which Linux has no GPU that torch calls "cuda": NVIDIA, Jetson, AMD, Windows below WSL.
GPU_DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")


def may_have_gpu() -> bool:
    """False if this machine certainly has no GPU; otherwise only torch can tell."""
    if platform.system() == "Linux":
        return any(Path(node).exists() for node in GPU_DEVICE_NODES)
    return True


def has_nvidia_driver() -> bool:
    """Whether the driver of an NVIDIA GPU is loaded, on Linux."""
    return Path(GPU_DEVICE_NODES[0]).exists()


def num_gpu_nodes() -> int:
    """The number of NVIDIA GPUs that this machine shows, on Linux."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def num_threads() -> int:
    """Threads for one computation: OMP_NUM_THREADS, else one per physical core that this process may use.

    A container's CPU quota counts, rounded up: threads beyond it would be stopped while the others wait for them.
    """
    omp_num_threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if omp_num_threads.isdigit() and int(omp_num_threads) > 0:
        return int(omp_num_threads)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = len({_physical_core(processor) for processor in os.sched_getaffinity(0)})
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns how many processors this process's control groups (Linux cgroups) let it use, or None for no limit.

    root: where /proc and /sys are, for tests.
    """
    return _lowest_limit(root, "cpu", _group_quota)


def _lowest_limit(root: Path, controller: str, limit_of: Callable[[Path], float | None]) -> float | None:
    """Returns the lowest limit that a controller of this process's control groups has, or None."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in memberships:
        _, controllers, group = line.split(":", 2)
        mount = root / "sys/fs/cgroup" / ("" if not controllers else controller)
        if controllers and controller not in controllers.split(","):
            continue
        folder = mount / group.lstrip("/")  # inside a container the group may be named as seen from outside
        limits += [limit_of(path) for path in (folder, *folder.parents) if path.is_relative_to(mount)]
    return min((limit for limit in limits if limit is not None), default=None)


def _group_quota(folder: Path) -> float | None:
    """Returns a control group's limit in processors: version 2's cpu.max, or version 1's two files."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such limit, or "max"
        return None


def _physical_core(processor: int) -> str:
    """A name of the core that runs this logical processor; the processor's number if the system does not tell."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)


def host_kv_cache_budget() -> int:
    """Default KV cache size in bytes: an eighth of the host's memory, at most 1 GiB."""
    return min(host_memory_bytes() // 8, 1 << 30)


def host_adapter_budget() -> int:
    """Bytes of adapters that wait in memory for a slot: an eighth of the host's memory, at most 4 GiB."""
    return min(host_memory_bytes() // 8, 4 << 30)


def host_memory_bytes(root: Path = Path("/")) -> int:
    """The memory of the host, or what this process's control groups let it use of that. root: as in `cpu_quota`."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _lowest_limit(root, "memory", _group_memory)
    return total_bytes if limit is None else min(total_bytes, int(limit))


def _group_memory(folder: Path) -> float | None:
    """Returns a control group's limit in bytes: version 2's memory.max, or version 1's file."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            return int((folder / name).read_text())
    return None


def trim_heap() -> None:
    """Returns freed memory to the system; glibc alone keeps what lies below a live allocation."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # C libraries without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
