"""One body for plain and async states: it awaits what a state returns, and a plain state returns values already."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


async def value_of(result: Any) -> Any:
    """Returns what a method of a state returned, awaited if the state is async."""
    return await result if inspect.isawaitable(result) else result


def finish(body: Coroutine[Any, Any, R]) -> R:
    """Runs a body to its end in this thread. It awaits values of plain states only, so it never waits for a loop.

    A StopIteration that it raises, such as a tool's `next(...)`, stays one, where Python makes it a RuntimeError.
    """
    try:
        body.send(None)
    except StopIteration as end:
        value: R = end.value
        return value
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration) and str(error) == "coroutine raised StopIteration":
            raise error.__cause__ from None
        raise
    body.close()
    raise AssertionError("a body for a plain state waited for an event loop")
