"""Runs the function of a tool, plain or async, from a thread or on an event loop, with or without a time limit."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from plait.lang.daemon_threads import run_in_daemon_thread
from plait.runtime.errors import InputError


def check_seconds(where: str, seconds: object) -> None:
    """Raises InputError, beginning with `where`, unless `seconds` is a number above 0."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds <= 0:  # type: ignore[arg-type,operator]
        raise InputError(f"{where} must be a number of seconds above 0, not {seconds!r:.80}")


def run_tool(name: str, function: Callable[..., Any], arguments: dict[str, Any], timeout: float | None) -> Any:
    """Returns the function's result; an async one is run to its end.

    With a `timeout` it runs in a thread of its own. TimeoutError is raised when the time has passed. An async function
    is cancelled then; a plain one cannot be stopped, and its thread goes on.
    """
    if timeout is None:
        value = function(**arguments)
        return _run_awaitable(name, value) if inspect.isawaitable(value) else value
    result: Future[Any] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result.set_result(context.run(_run_here, function, arguments, timeout))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name=f"plait tool {name}", daemon=True).start()
    try:
        return result.result(timeout)
    except TimeoutError:
        if result.done() and not _is_cancelled_by_timeout(result):
            raise  # by the tool itself
        raise _timed_out(name, timeout) from None


async def run_tool_async(
    name: str, function: Callable[..., Any], arguments: dict[str, Any], timeout: float | None
) -> Any:
    """`run_tool` for an event loop: awaits an async function, runs a plain one in a thread."""
    call_async = function if inspect.iscoroutinefunction(function) else getattr(function, "call_async", None)
    try:
        async with asyncio.timeout(timeout) as limit:
            if call_async is not None:
                return await call_async(**arguments)
            value = await run_in_daemon_thread(function, **arguments)
            return await value if inspect.isawaitable(value) else value
    except TimeoutError:
        if not limit.expired() or timeout is None:
            raise
        raise _timed_out(name, timeout) from None


class _Cancelled(TimeoutError):
    """An async function was cancelled by the time limit."""


def _run_here(function: Callable[..., Any], arguments: dict[str, Any], timeout: float) -> Any:
    value = function(**arguments)
    return asyncio.run(_awaited(value, timeout)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[Any], timeout: float | None = None) -> Any:
    try:
        async with asyncio.timeout(timeout) as limit:
            return await value
    except TimeoutError:
        if limit.expired():
            raise _Cancelled from None
        raise


def _is_cancelled_by_timeout(result: Future[Any]) -> bool:
    return isinstance(result.exception(), _Cancelled)


def _timed_out(name: str, timeout: float) -> TimeoutError:
    return TimeoutError(f"the tool {name} did not end within {timeout:g} s")


def _run_awaitable(name: str, value: Any) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_awaited(value))
    if inspect.iscoroutine(value):
        value.close()
    raise InputError(f"the tool {name!r} is async, and this thread has a running event loop: use an async def program")
