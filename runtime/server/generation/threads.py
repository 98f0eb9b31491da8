"""Runs work that takes more than a few milliseconds in a thread, beside the event loop.

The interpreter lets the loop run every few milliseconds, unless the thread is within one long call of a C function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGE_TOKENS = 256  # an answer's; converting its logprobs takes milliseconds if there are more


async def run_in_thread_if(is_large: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns `work(...)`, which is called in a thread if it `is_large`."""
    return await asyncio.to_thread(work, *args, **kwargs) if is_large else work(*args, **kwargs)
