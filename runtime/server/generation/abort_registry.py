"""Running calls by request id, so that a client can abort them. Tenants cannot abort each other's requests."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

Key = tuple[str, str]  # tenant, request id


class AbortRegistry:
    """How to abort each running request.

    >>> registry = AbortRegistry()
    >>> with registry.registered("t", "r1", lambda: True):
    ...     registry.abort("other", "r1"), registry.abort("t", "r1"), registry.abort("t", None)
    (0, 1, 1)
    """

    def __init__(self) -> None:
        self._running: defaultdict[Key, list[Callable[[], bool]]] = defaultdict(list)

    @contextlib.contextmanager
    def registered(self, tenant: str, rid: str, abort: Callable[[], bool]) -> Iterator[None]:
        """Calls `abort` if `rid` is aborted within the block. It returns whether it had something to abort."""
        key = (tenant, rid)
        self._running[key].append(abort)
        try:
            yield
        finally:
            self._running[key].remove(abort)
            if not self._running[key]:
                del self._running[key]

    def abort(self, tenant: str, rid: str | None) -> int:
        """Aborts the tenant's requests with this `rid`, or all of them; returns their number."""
        aborts = [
            abort
            for (owner, name), running in self._running.items()
            for abort in running
            if owner == tenant and rid in (None, name)
        ]
        return sum([abort() for abort in aborts])
