"""Ends a streamed program when nobody can read it any more: its state was dropped, with every stream and read of it.

So a handler that forgets a program needs no code: its frame goes, the state with it, and the calls are aborted.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.lang.core.run import Run
    from plait.lang.states.base_state import BaseState

# The garbage collector may be the caller, with any lock held: `SimpleQueue.put` is safe there, `Run.abort` is not.
_dropped: SimpleQueue[Run] = SimpleQueue()


def abort_when_dropped(state: BaseState, run: Run) -> None:
    """Aborts `run` soon after `state` was garbage-collected, unless the run has ended. `run` must not refer to it."""
    _start_thread()
    weakref.finalize(state, _dropped.put, run).atexit = False


@cache
def _start_thread() -> None:
    threading.Thread(target=_abort_dropped, name="plait dropped states", daemon=True).start()


def _abort_dropped() -> None:
    while True:
        _dropped.get().abort()
