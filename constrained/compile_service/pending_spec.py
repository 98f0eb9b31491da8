"""A spec that is not compiled yet, with the tickets that wait for it, all such specs, and the two queues of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from plait.constrained.specs import Spec
from plait.constrained.tenant_shares import TenantQueue, TenantShares

MAX_SPECS_OF_TENANT = 1024  # that are not compiled yet
MAX_BYTES_OF_TENANT = 16 << 20  # of these specs
GIVE_WAY_S = 0.05  # seconds of a worker, for its weight, by which a tenant is ahead of one that takes its place


@dataclass(eq=False)
class PendingSpec:
    """A spec and the tenant of each ticket that waits for it.

    `owner`: the tenant that is charged for it. `is_small`: it is compiled in the small queue. `answer_by`: when it must
    have been answered (monotonic seconds), once it is being compiled. `gives_way`: it is being compiled while another
    tenant waits that was served less. `is_stopped`: its worker does not run, since another one took its place.
    `is_done`: it has been answered, or has no tickets any more.
    """

    spec: Spec
    owner: str
    num_bytes: int
    is_small: bool
    tickets: dict[int, str] = field(default_factory=dict)
    answer_by: float = math.inf
    gives_way: bool = False
    is_stopped: bool = False
    is_done: bool = False


class PendingSpecs:
    """All specs that are not compiled yet, at most `MAX_SPECS_OF_TENANT` and `MAX_BYTES_OF_TENANT` of an owner."""

    def __init__(self) -> None:
        self._by_spec: dict[Spec, PendingSpec] = {}
        self._num_specs, self._num_bytes = Counter[str](), Counter[str]()  # by owner

    def __len__(self) -> int:
        return len(self._by_spec)

    def __iter__(self) -> Iterator[PendingSpec]:
        return iter(list(self._by_spec.values()))

    def get(self, spec: Spec) -> PendingSpec | None:
        return self._by_spec.get(spec)

    def num_specs_of(self, owner: str) -> int:
        """Returns how many specs are counted for a tenant."""
        return self._num_specs[owner]

    def add(self, spec: Spec, owner: str, *, is_small: bool) -> PendingSpec | None:
        """Returns a new pending spec, counted for its owner; None if the owner has too many."""
        num_bytes = len(msgspec.msgpack.encode(spec))
        is_full = self._num_specs[owner] >= MAX_SPECS_OF_TENANT
        if is_full or self._num_bytes[owner] + num_bytes > MAX_BYTES_OF_TENANT:
            return None
        pending = self._by_spec[spec] = PendingSpec(spec, owner, num_bytes, is_small)
        self._num_specs[owner] += 1
        self._num_bytes[owner] += num_bytes
        return pending

    def remove(self, pending: PendingSpec) -> None:
        """Removes a pending spec, which is no longer queued."""
        del self._by_spec[pending.spec]
        pending.is_done = True
        owner = pending.owner
        self._num_specs[owner] -= 1
        self._num_bytes[owner] -= pending.num_bytes
        if not self._num_specs[owner]:
            del self._num_specs[owner], self._num_bytes[owner]


class SpecQueues:
    """The queue of small specs and the queue of large ones. Tenants share the workers by weight and by time.

    A spec that was taken from a queue holds a worker until `settle` finds that it has ended, or that it gives way to a
    spec of the same queue: a tenant that was served less does not wait until an expensive spec has ended.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._shares = TenantShares(weights)
        self._small, self._large = TenantQueue[PendingSpec](self._shares), TenantQueue[PendingSpec](self._shares)
        self._begun: dict[PendingSpec, tuple[str, float]] = {}  # (tenant, monotonic seconds)

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
        queue = self._small if pending.is_small else self._large
        queue.put(tenant, pending, first=first)

    def discard(self, pending: PendingSpec, tenant: str | None = None) -> None:
        """Removes a spec for `tenant`, or for all of its tenants; does nothing if it is not queued."""
        self._small.discard(pending, tenant)
        self._large.discard(pending, tenant)

    def pop(self, now: float, *, may_be_large: bool) -> PendingSpec | None:
        """Removes and returns the next large spec if `may_be_large`, else the next small one, else None."""
        queue = self._large if may_be_large and len(self._large) else self._small
        if not len(queue):
            return None
        tenant, pending = queue.pop(now)
        self._shares.take(tenant)
        self._begun[pending] = tenant, now
        pending.gives_way = pending.is_stopped = False
        return pending

    def settle(self, running: Collection[PendingSpec], now: float) -> None:
        """Charges the tenants of running specs for the time, takes back the workers of specs that no longer run, and
        finds those that give way. `running` need not have those that give way or are stopped."""
        for pending, (tenant, since) in list(self._begun.items()):
            if not pending.is_stopped:
                self._shares.charge(tenant, now - since, now)
            has_place = pending in running or pending.gives_way or pending.is_stopped
            if has_place and not pending.is_done and pending not in self:
                self._begun[pending] = tenant, now
            else:
                del self._begun[pending]
                self._shares.take(tenant, -1)
        for pending, (tenant, _) in self._begun.items():
            queue = self._small if pending.is_small else self._large
            other = queue.next_tenant(now)
            if other is None or pending.is_stopped:
                pending.gives_way = False
            else:
                ahead = self._shares.service(tenant, now) - self._shares.service(other, now)
                pending.gives_way = other != tenant and ahead > GIVE_WAY_S
