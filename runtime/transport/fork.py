"""What an object does in a forked child, where threads are gone and sockets and processes are the parent's.

Knows: os.register_at_fork, which forgets nothing. Must not know: what is done there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def register_after_fork_in_child(method: Callable[[], None]) -> None:
    """Calls an object's `method` in every child forked while the object lives; it does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=call)
