"""Models of random weights beside a models file."""

from __future__ import annotations

import shutil

import pytest
from tiny_llama_gguf import write_small_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    write_small_model(folder / "tiny.gguf", context=1 << 20)
    shutil.copy(folder / "tiny.gguf", folder / "gone.gguf")
    damaged = (folder / "tiny.gguf").read_bytes()
    (folder / "damaged.gguf").write_bytes(damaged[: len(damaged) // 2])
    return folder
