"""How a child process learns that the process that started it, its owner, has ended; see `child_process`."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable


def watch_owner(on_end: Callable[[], object], descriptor: int = 0) -> None:
    """Calls `on_end` in a thread when the owner has closed its end of a pipe or socket, or has ended.

    The kernel closes it however the owner ends. The thread reads nothing, and works while the others are within an
    operation that never returns.
    """

    def watch() -> None:
        poller = select.poll()
        poller.register(descriptor, 0)  # reports the end only
        poller.poll()
        on_end()

    threading.Thread(target=watch, name="plait-owner", daemon=True).start()
