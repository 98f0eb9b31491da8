"""Which adapter computes the calls of a program: `gen(adapter=...)`, and `with plait.adapter(...)` around several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

from plait.runtime.errors import InputError

E = TypeVar("E", bound=Any)

_of_block: ContextVar[str | None] = ContextVar("plait_adapter", default=None)


@contextmanager
def adapter(name: str) -> Iterator[None]:
    """The gens and selects that are made in the block are computed with the adapter `name`; "" is the model alone.

    Around a run it is the adapter of the whole program, but for calls that name another one. A call that has another
    adapter than the one before computes the text again, unless it is cached for that adapter. Adapters are named when
    the runtime starts, `Runtime(adapters={"sql": "adapters/sql"})`; a call with an unknown one fails.

    >>> with plait.adapter("sql"):                                   # doctest: +SKIP
    ...     s += gen("query", max_tokens=64)
    """
    token = _of_block.set(checked_adapter("adapter", name))
    try:
        yield
    finally:
        _of_block.reset(token)


def adapter_of_block() -> str | None:
    """The adapter of the innermost block; None outside of all."""
    return _of_block.get()


def checked_adapter(where: str, name: object) -> str:
    """The name of an adapter. Raises InputError for what cannot be one."""
    if not isinstance(name, str):
        raise InputError(f"{where}: an adapter is named by a text, not {name!r:.80}")
    return name


def with_adapter(where: str, expr: E, name: object) -> E:
    """The call with the adapter `name`, or with that of the block that it is made in."""
    chosen = adapter_of_block() if name is None else checked_adapter(where, name)
    return expr if chosen is None else replace(expr, adapter=chosen)
