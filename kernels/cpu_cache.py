"""Compiled kernels on disk are taken again only while every file they were made of is the same.

numba looks at the file of the function it keeps, not at those of the functions that one calls. What a function
captures is part of its key, so each kept function captures `STAMP`. Where no folder can be written nothing is kept.

Knows: the files of this folder. Must not know: what they compute.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def _stamp() -> int:
    files = sorted(Path(__file__).parent.glob("cpu_*.py"))
    return zlib.crc32(b"\0".join(file.read_bytes() for file in files))


STAMP = _stamp()


def kept(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with these options, the result kept on disk; numba looks for a folder it can write at once."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # a read-only installation without a home: each process compiles for itself
            return numba.njit(**options)(function)

    return compiled
