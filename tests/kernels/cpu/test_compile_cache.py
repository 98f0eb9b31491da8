"""The cache of compiled kernels: any change of a source file must invalidate it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from plait.kernels.cpu.compiler import compile_cache


@pytest.mark.parametrize("name", ["parallel/threads.py", "gemm/int8_kernel.py", "attention/kv_layout.py"])
def test_source_hash_changes_with_every_file(name, tmp_path) -> None:
    folder = Path(compile_cache.__file__).parent.parent
    copy = shutil.copytree(folder, tmp_path / "cpu", ignore=shutil.ignore_patterns("__pycache__"))
    assert source_hash_of(copy) == compile_cache.SOURCE_HASH
    changed = copy / name
    changed.write_text(changed.read_text() + "\n")
    assert source_hash_of(copy) != compile_cache.SOURCE_HASH


def source_hash_of(folder: Path) -> int:
    spec = importlib.util.spec_from_file_location("copied", folder / "compiler" / "compile_cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SOURCE_HASH
