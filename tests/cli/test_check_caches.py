"""`plait check`: where packed weights and compiled kernels are kept, and why they are not."""

from __future__ import annotations

import os

import pytest

from plait.cli import main
from plait.runtime.executor.kernel_cache import NOT_OPTIMIZED


@pytest.fixture
def lines(capsys, monkeypatch):
    for name in ("PLAIT_MODEL", "PLAIT_KERNEL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def check(cache_home):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
        assert main(["check"]) == 0
        return dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())

    return check


def test_check_names_the_folders(lines, tmp_path):
    found = lines(tmp_path)
    assert f"keeps them in {tmp_path}/plait/packed-weights" in found["packed weights"]
    assert found["compiled kernels"].strip() == f"kept in {tmp_path}/plait/kernels{NOT_OPTIMIZED}"


def test_check_says_that_there_is_no_folder(lines, tmp_path):
    (tmp_path / "file").write_text("")
    found = lines(tmp_path / "file")
    assert "not kept on disk: " in found["packed weights"] and "(Not a directory)" in found["packed weights"]
    assert "not kept, so every start compiles them" in found["compiled kernels"]


def test_check_says_that_a_cache_cannot_be_written(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not os.W_OK & mode)  # modes of folders do not bind root
    found = lines(tmp_path)
    assert f"not kept on disk: {tmp_path} cannot be written; set XDG_CACHE_HOME" in found["packed weights"]
    assert "not kept, so every start compiles them" in found["compiled kernels"]


def test_check_says_that_others_may_write_into_a_cache(lines, tmp_path):
    (tmp_path / "plait" / "kernels").mkdir(parents=True)
    (tmp_path / "plait" / "kernels").chmod(0o777)
    assert "or others may write there; set XDG_CACHE_HOME" in lines(tmp_path)["compiled kernels"]
