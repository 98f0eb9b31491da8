"""A spec that is not compiled yet, with the tickets that wait for it, and the two queues of such specs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from plait.constrained.compile_service.fair_queue import FairQueue
from plait.constrained.specs import Spec


@dataclass(eq=False)
class PendingSpec:
    """A spec and the tenant of each ticket that waits for it.

    `owner`: the tenant that is charged for it. `is_small`: it is compiled in the small lane. `answer_by`: when it must
    have been answered (monotonic seconds), once it is being compiled.
    """

    spec: Spec
    owner: str
    num_bytes: int
    is_small: bool
    tickets: dict[int, str] = field(default_factory=dict)
    answer_by: float = math.inf


class Lanes:
    """The queue of small specs and the queue of large ones, each fair to all tenants."""

    def __init__(self) -> None:
        self._small, self._large = FairQueue[PendingSpec](), FairQueue[PendingSpec]()

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    def __contains__(self, pending: object) -> bool:
        return pending in self._small or pending in self._large

    @property
    def has_large(self) -> bool:
        """Whether a large spec waits."""
        return len(self._large) > 0

    def put(self, pending: PendingSpec, tenant: str, *, first: bool = False) -> None:
        """Queues a spec for one of its tenants."""
        lane = self._small if pending.is_small else self._large
        lane.put(tenant, pending, first=first)

    def discard(self, pending: PendingSpec, tenant: str | None = None) -> None:
        """Removes a spec for `tenant`, or for all of its tenants; does nothing if it is not queued."""
        self._small.discard(pending, tenant)
        self._large.discard(pending, tenant)

    def pop(self, *, may_be_large: bool) -> PendingSpec | None:
        """Removes and returns the next large spec if `may_be_large`, else the next small one, else None."""
        if may_be_large and len(self._large):
            return self._large.pop()
        return self._small.pop() if len(self._small) else None
