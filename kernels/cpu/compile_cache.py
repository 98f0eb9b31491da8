"""The hash of the kernels' sources, which any change invalidates compiled kernels by, and numba's cache on disk.

numba checks the file of the cached function only, not those of the functions that it calls. But the values that a
function captures are part of its cache key, so each cached function captures `SOURCE_HASH`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _source_hash() -> int:
    """Returns a hash, below 2^63, of the names and contents of all source files of this package."""
    folder = Path(__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert Path(__file__) in files and len(files) > 20, "without these sources, stale machine code would be loaded"
    contents = b"\0".join(bytes(file.relative_to(folder)) + b"\0" + file.read_bytes() for file in files)
    return int.from_bytes(hashlib.sha256(contents).digest()[:8]) >> 1


SOURCE_HASH = _source_hash()


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns `numba.njit` with these options and a cache on disk, or without one if no folder can be written."""

    import numba  # only torch's attention is compiled by numba

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # a read-only installation without a home folder: each process compiles for itself
            return numba.njit(**options)(function)

    return compiled
