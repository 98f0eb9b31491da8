"""Which replicas Ray Serve lists in this process. A module of its own: Ray copies the module of a request router by
value, so that its variables are not those of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

Listener = Callable[[Sequence[str]], None]

_listeners: list[Listener] = []
_listed: list[str] = []
_lock = threading.Lock()  # a listener that is added must not get an older list last


def tell_replicas(ids: Sequence[str]) -> None:
    """Sets the replicas that take requests, and tells the listeners."""
    with _lock:
        _listed[:] = ids
        for listener in tuple(_listeners):
            listener(list(_listed))


def listen_to_replicas(listener: Listener) -> None:
    """Calls `listener` with the ids of the replicas now, and when they change, in a thread of Ray Serve. It must not
    wait."""
    with _lock:
        _listeners.append(listener)
        listener(list(_listed))
