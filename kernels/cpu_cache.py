"""Compiled kernels on disk are taken again only while every file they were made of is the same.

numba looks at the file of the function it keeps, not at those of the functions that one calls. What a function
captures is part of its key, so each kept function captures `STAMP`.

Knows: the files of this folder. Must not know: what they compute.
"""

from __future__ import annotations

import zlib
from pathlib import Path


def _stamp() -> int:
    files = sorted(Path(__file__).parent.glob("cpu_*.py"))
    return zlib.crc32(b"\0".join(file.read_bytes() for file in files))


STAMP = _stamp()
