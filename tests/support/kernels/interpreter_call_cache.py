"""Makes calls between kernel functions cheap in Triton's interpreter, where they take a third of its time.

At each such call it looks through the whole language again for what to replace, though the kernel that runs has had it
replaced already. `install()` leaves that out until the kernel ends; kernel_device calls it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def install() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._patch_lang
    if getattr(plain, "is_remembered", False):
        return
    replaced: set[str] = set()  # in the kernel that runs

    @functools.cache
    def names(function: Any) -> frozenset[str]:
        """Of the language's modules that the function sees, which are those that are looked through for it."""
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in (tl, tl.core) if module in seen)

    def patch(function: Any) -> Any:
        if replaced and names(function) <= replaced:
            return None  # a call within a kernel, which has no use for the answer
        scope = plain(function)
        if hasattr(scope, "restore"):  # else nothing is ever put back, nor told of
            replaced.update(names(function))
            scope.restore = functools.partial(_end, scope.restore, replaced)
        return scope

    patch.is_remembered = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch


def _end(restore: Any, replaced: set[str]) -> None:
    replaced.clear()
    restore()
