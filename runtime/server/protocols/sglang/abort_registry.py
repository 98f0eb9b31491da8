"""Which calls run under which request id, so that a client can end them by its own name for them.

A client's names are its own: tenants cannot end each other's requests.

Knows: names and what ends them. Must not know: HTTP, answers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

Key = tuple[str, str]  # tenant, request id


class AbortRegistry:
    """What runs now.

    >>> registry, ended = Registry(), []
    >>> with registry.holding("t", "r1", lambda: ended.append("r1")):
    ...     registry.abort("other", "r1"), registry.abort("t", "r1"), registry.abort("t", None)
    (0, 1, 1)
    """

    def __init__(self) -> None:
        self._running: defaultdict[Key, list[Callable[[], None]]] = defaultdict(list)

    @contextlib.contextmanager
    def registered(self, tenant: str, rid: str, end: Callable[[], None]) -> Iterator[None]:
        """`end` is called when `rid` is aborted meanwhile."""
        key = (tenant, rid)
        self._running[key].append(end)
        try:
            yield
        finally:
            self._running[key].remove(end)
            if not self._running[key]:
                del self._running[key]

    def abort(self, tenant: str, rid: str | None) -> int:
        """Ends what runs under `rid`, or all of the tenant's; how many requests that were."""
        ends = [
            end
            for (owner, name), each in self._running.items()
            for end in each
            if owner == tenant and rid in (None, name)
        ]
        for end in ends:
            end()
        return len(ends)
