"""Makes calls between kernel functions cheap in Triton's interpreter, where they take a third of the time.

The interpreter patches the modules of Triton's language again at every call, although they are patched already while a
kernel runs. `install()` skips this until the kernel ends; triton_device calls it.
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
    patched: set[str] = set()  # names of the modules, while a kernel runs

    @functools.cache
    def names(function: Any) -> frozenset[str]:
        """The names of the language's modules that are globals of the function, which are those to be patched."""
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in (tl, tl.core) if module in modules)

    def patch(function: Any) -> Any:
        if patched and names(function) <= patched:
            return None  # a call within a kernel, which ignores the return value
        scope = plain(function)
        if hasattr(scope, "restore"):  # without it nothing is restored
            patched.update(names(function))
            scope.restore = functools.partial(_end, scope.restore, patched)
        return scope

    patch.is_remembered = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch


def _end(restore: Any, patched: set[str]) -> None:
    patched.clear()
    restore()
