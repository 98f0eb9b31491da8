"""The packed CPU runner loads its kernels in a thread while it reads the weights."""

from __future__ import annotations

import threading

import pytest

from plait.runtime.executor import packed_cpu_runner
from plait.runtime.executor.packed_cpu_runner import _KernelLoading
from plait.runtime.process.runtime import is_compiling


def test_kernels_are_loaded_while_the_block_runs(monkeypatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    loaded, shown = [], []

    def load_kernels(progress, wait_until_optimized) -> None:
        progress(0.5, "compiling")
        has_begun.set()
        assert may_end.wait(60)
        loaded.append(wait_until_optimized)

    monkeypatch.setattr(packed_cpu_runner, "load_kernels", load_kernels)
    monkeypatch.setattr(packed_cpu_runner, "layout_kernel", loaded.append)
    with _KernelLoading(lambda fraction, doing: shown.append((fraction, doing)), ["Q4_K"]) as kernels:
        assert has_begun.wait(60)
        kernels.show(0.1, "loading")  # not shown: compiling takes longer
        assert [text for _, text in shown] == ["compiling"] and False not in loaded
        may_end.set()
    assert loaded == ["Q4_K", False]


def test_what_the_block_does_is_shown_if_nothing_is_compiled(monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(packed_cpu_runner, "load_kernels", lambda progress, wait: None)
    with _KernelLoading(lambda fraction, doing: shown.append((fraction, doing))) as kernels:
        kernels.show(0.1, "loading")
    assert shown == [(0.1, "loading")]


def test_deterministic_steps_wait_until_kernels_are_optimized(monkeypatch) -> None:
    waits = []
    monkeypatch.setattr(packed_cpu_runner, "load_kernels", lambda progress, wait: waits.append(wait))
    for deterministic in (False, True):
        with _KernelLoading(lambda fraction, doing: None, deterministic=deterministic):
            pass
    assert waits == [False, True]


def test_an_error_of_the_kernels_is_raised_at_the_end_of_the_block(monkeypatch) -> None:
    def load_kernels(progress, wait_until_optimized) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(packed_cpu_runner, "load_kernels", load_kernels)
    with pytest.raises(OSError, match="no compiler"), _KernelLoading(lambda fraction, doing: None):
        pass


def test_compiling_is_announced_where_no_kernels_can_be_kept(monkeypatch, tmp_path) -> None:
    shown = []
    monkeypatch.delenv("PLAIT_KERNEL_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(packed_cpu_runner, "load_kernels", lambda progress, wait: progress(0.0, "compiling kernels"))
    with _KernelLoading(lambda fraction, doing: shown.append(doing)):
        pass
    (doing,) = shown
    assert is_compiling(doing) and "at every start" in doing and "plait check" in doing
