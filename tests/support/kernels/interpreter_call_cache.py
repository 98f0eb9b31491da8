"""Makes launches and calls cheap in Triton's interpreter, where they take a third of the time.

For each launch the interpreter searches the modules of Triton's language for the functions to be replaced, and again
at each call from one kernel function to another. `install()` remembers the replacements: a launch sets them, its end
restores the language, and calls in between change nothing. triton_device calls it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def install() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._patch_lang
    if getattr(plain, "is_remembered", False):
        return
    remembered: list[tuple[Any, str, Any, Any]] = []  # see `_replacements`
    launches: list[_Launch] = []  # the one that runs

    def patch(function: Any) -> Any:
        if launches:  # a call within a kernel, which ignores the return value
            return None
        if not remembered:
            scope = plain(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            remembered.extend(_replacements(scope._changes, interpreter.interpreter_semantic))
            scope.restore()
        for owner, name, _, value in remembered:
            setattr(owner, name, value)
        launches.append(_Launch(remembered, interpreter._MISSING, launches))
        return launches[0]

    patch.is_remembered = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch


class _Launch:
    """Restores the language at the end of a launch."""

    def __init__(self, replaced: list[tuple[Any, str, Any, Any]], missing: Any, launches: list[_Launch]) -> None:
        self._replaced, self._missing, self._launches = replaced, missing, launches

    def restore(self) -> None:
        for owner, name, original, _ in self._replaced:
            if original is self._missing:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._launches.clear()


def _replacements(changes: list[tuple[Any, str, Any]], semantic: Any) -> list[tuple[Any, str, Any, Any]]:
    """Owner, name, original and replacement of all that the interpreter has changed; a name once."""
    first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for owner, name, original in changes:
        first.setdefault((id(owner), name), (owner, name, original))
    return [(owner, name, original, _direct(vars(owner)[name], semantic)) for owner, name, original in first.values()]


def _direct(replacement: Any, semantic: Any) -> Any:
    """A function that does what the replacement of a builtin does, with fewer steps; other replacements as they are."""
    builtin = (getattr(replacement, "__kwdefaults__", None) or {}).get("member")
    if builtin is None:
        return replacement
    function = getattr(builtin, "__wrapped__", builtin)  # without the check that there is a semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call
