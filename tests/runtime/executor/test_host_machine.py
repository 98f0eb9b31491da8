"""Threads for one computation: cores, OMP_NUM_THREADS, and the CPU quota of a container."""

from __future__ import annotations

import os

import pytest

from plait.runtime.executor import host_machine
from plait.runtime.executor.host_machine import cpu_quota, host_memory_bytes, num_threads


@pytest.fixture
def cgroups(tmp_path):
    """Writes /proc/self/cgroup and the limits of control groups below a folder; returns that folder."""

    def write(membership: str, files: dict[str, str]):
        for name, text in {"proc/self/cgroup": membership, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "400000 100000"}, 4.0),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "50000 100000", "sys/fs/cgroup/a/cpu.max": "400000 100000"}, 0.5),
        ("0::/seen/from/outside\n", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            "5:memory:/x\n4:cpu,cpuacct:/x\n0::/\n",
            {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        (
            "4:cpu:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "damaged"}, None),
    ],
)
def test_quota_of_the_control_groups(cgroups, membership, files, quota) -> None:
    assert cpu_quota(cgroups(membership, files)) == quota


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": "1048576\n", "sys/fs/cgroup/memory.max": "max\n"}, 1 << 20),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n"}, None),
        ("5:memory:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2097152\n"}, 2 << 20),
        ("5:memory:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_memory_of_the_control_groups(cgroups, membership, files, limit) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory_bytes(cgroups(membership, files)) == (limit or total)


def test_a_system_without_control_groups_has_no_quota(tmp_path) -> None:
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (16.0, 8), (2.0, 2), (1.5, 2), (0.3, 1)])
def test_threads_fit_the_quota(monkeypatch, quota, threads) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(host_machine, "_physical_core", lambda processor: str(processor // 2))
    monkeypatch.setattr(host_machine, "cpu_quota", lambda: quota)
    assert num_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert num_threads() == 5
