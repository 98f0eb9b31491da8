"""Compiled kernels on disk are taken again only while every file they were made of is the same.

numba looks at the file of the function it keeps, not at those of the functions that one calls. What a function
captures is part of its key, so each kept function captures `SOURCE_HASH`. Where no folder can be written nothing is kept.

Knows: the files of this folder. Must not know: what they compute.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def _source_hash() -> int:
    folder = Path(__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert Path(__file__) in files and len(files) > 20, (
        "the kernels' sources lie elsewhere: old machine code would be loaded"
    )
    return zlib.crc32(b"\0".join(bytes(file.relative_to(folder)) + b"\0" + file.read_bytes() for file in files))


SOURCE_HASH = _source_hash()


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with these options, the result kept on disk; numba looks for a folder it can write at once."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # a read-only installation without a home: each process compiles for itself
            return numba.njit(**options)(function)

    return compiled
