"""The packed CPU runner loads its kernels in a thread while it reads the weights."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from plait.runtime.executor import packed_cpu_runner
from plait.runtime.executor.packed_cpu_runner import _KernelLoading
from plait.runtime.process.startup_display import is_compiling


def test_kernels_are_loaded_while_the_block_runs(monkeypatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    loaded, shown = [], []

    def compile_missing(progress) -> None:
        progress(0.5, "compiling")
        has_begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(packed_cpu_runner, "compile_missing", compile_missing)
    libraries = {name: SimpleNamespace(load=partial(loaded.append, name)) for name in "ab"}
    monkeypatch.setattr(packed_cpu_runner, "KERNELS", libraries)
    with _KernelLoading(lambda fraction, doing: shown.append((fraction, doing))) as kernels:
        assert has_begun.wait(60)
        kernels.show(0.1, "loading")  # not shown: compiling takes longer
        assert shown == [(0.5, "compiling")] and not loaded
        may_end.set()
    assert loaded == ["a", "b"]


def test_what_the_block_does_is_shown_if_nothing_is_compiled(monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(packed_cpu_runner, "compile_missing", lambda progress: None)
    monkeypatch.setattr(packed_cpu_runner, "KERNELS", {})
    with _KernelLoading(lambda fraction, doing: shown.append((fraction, doing))) as kernels:
        kernels.show(0.1, "loading")
    assert shown == [(0.1, "loading")]


def test_an_error_of_the_kernels_is_raised_at_the_end_of_the_block(monkeypatch) -> None:
    def compile_missing(progress) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(packed_cpu_runner, "compile_missing", compile_missing)
    with pytest.raises(OSError, match="no compiler"), _KernelLoading(lambda fraction, doing: None):
        pass


def test_compiling_is_announced_where_no_kernels_can_be_kept(monkeypatch, tmp_path) -> None:
    shown = []
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(packed_cpu_runner, "KERNELS", {})
    with _KernelLoading(lambda fraction, doing: shown.append(doing)):
        pass
    (doing,) = shown
    assert is_compiling(doing) and "at every start" in doing and "plait check" in doing
