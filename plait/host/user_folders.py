"""plait's folders of this user: the cache, and what is kept besides (XDG Base Directory Specification)."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns `plait` in XDG_CACHE_HOME or ~/.cache. It may not exist. Raises RuntimeError without a home folder."""
    return _folder("XDG_CACHE_HOME", ".cache")


def kernel_folder() -> Path:
    """Returns the folder of compiled kernels: in the one that PLAIT_KERNEL_CACHE_DIR names, else in the cache."""
    configured = os.environ.get("PLAIT_KERNEL_CACHE_DIR") or os.environ.get("NUMBA_CACHE_DIR")  # the name until 0.3
    return Path(configured) / "plait-kernels" if configured else cache_folder() / "kernels"


def state_folder() -> Path:
    """Returns `plait` in XDG_STATE_HOME or ~/.local/state. It may not exist. Raises RuntimeError without a home."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, default: str) -> Path:
    folder = Path(os.environ.get(variable, ""))
    return (folder if folder.is_absolute() else Path.home() / default) / "plait"
