"""Which replicas Ray Serve lists in this process. A module of its own: Ray copies the module of a request router by
value, so that its variables are not those of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Listener = Callable[[Sequence[str]], None]

_listeners: list[Listener] = []
_listed: list[str] = []


def tell_replicas(ids: Sequence[str]) -> None:
    """Sets the replicas that take requests, and tells the listeners."""
    _listed[:] = ids
    for listener in tuple(_listeners):
        listener(list(_listed))


def listen_to_replicas(listener: Listener) -> None:
    """Calls `listener` with the ids of the replicas now, and when they change, in a thread of Ray Serve."""
    _listeners.append(listener)
    listener(list(_listed))
