"""Validates the texts of lenient constraints without stopping the event loop, however long a client's schema takes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from plait.constrained.validation_process import validation_error_within
from plait.runtime.client.call import CallResult

# Threads of their own: validations that run into their time limit must not delay what else runs in threads.
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="plait-validation")


async def find_violation(result: CallResult) -> str | None:
    """As `CallResult.violation`, but computed in a process with a time limit."""
    if result.lenient_constraint is None:
        return None
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, validation_error_within, result.lenient_constraint, result.text)
