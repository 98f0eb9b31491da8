"""Messages to users about the folder of compiled CPU kernels."""

from __future__ import annotations

from plait.host.terminal import Concern
from plait.kernels.cpu.compiler.object_code import cache_folder, readable_folder
from plait.kernels.cpu.precompile import KERNELS

COMPILING_EVERY_TIME = "compiling kernels, at every start: there is no folder to keep them in (see plait check)"

NOT_OPTIMIZED = "; not optimized yet: a runtime answers with kernels compiled quickly, and optimizes them meanwhile"


def can_keep_kernels() -> bool:
    """Returns whether compiled kernels are kept for the next start."""
    return cache_folder() is not None


def describe_kernel_cache() -> str:
    """Says for `plait check` where compiled kernels are kept, or why they are not."""
    is_missing = any(library.is_missing for library in KERNELS.values())
    if (folder := cache_folder()) is not None:
        return f"kept in {folder}" + (NOT_OPTIMIZED if is_missing else "")
    if (folder := readable_folder()) is not None and not is_missing:
        return f"read from {folder}, which cannot be written"
    reason = "the user's cache folder cannot be written, or belongs to another user, or others may write there"
    return Concern(f"not kept, so every start compiles them: {reason}; set XDG_CACHE_HOME to a folder of your own")
