"""Hooks for forked children, which have no threads and share the parent's sockets and child processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def register_after_fork_in_child(method: Callable[[], None]) -> None:
    """Calls a bound `method` in every child that is forked while its object is alive.

    The registration holds a weak reference. `os.register_at_fork` has no inverse, so a dead object's hook stays and
    does nothing.
    """
    reference = weakref.WeakMethod(method)

    def call_if_alive() -> None:
        live_method = reference()
        if live_method is not None:
            live_method()

    os.register_at_fork(after_in_child=call_if_alive)
