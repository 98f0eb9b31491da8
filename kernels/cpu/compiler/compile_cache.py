"""The hash of the kernels' sources: any change of them invalidates compiled kernels."""

from __future__ import annotations

import hashlib
from pathlib import Path


def _source_hash() -> int:
    """Returns a hash, below 2^63, of the names and contents of all source files of `kernels.cpu`."""
    folder = Path(__file__).parent.parent
    files = sorted(folder.rglob("*.py"))
    assert Path(__file__) in files and len(files) > 20, "without these sources, stale machine code would be loaded"
    contents = b"\0".join(bytes(file.relative_to(folder)) + b"\0" + file.read_bytes() for file in files)
    return int.from_bytes(hashlib.sha256(contents).digest()[:8]) >> 1


SOURCE_HASH = _source_hash()
