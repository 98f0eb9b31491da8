"""A spec that is not compiled yet, with the tickets that wait for it, all such specs, and the three queues of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from plait.constrained.specs import Spec
from plait.constrained.tenant_shares import TenantQueue, TenantShares

MAX_SPECS_OF_TENANT = 1024  # that are not compiled yet
MAX_BYTES_OF_TENANT = 16 << 20  # of these specs
GIVE_WAY_S = 0.05  # seconds of a worker, for its weight, by which a tenant is ahead of one that takes its place
USED_S = 2.0  # CPU seconds lately, for its weight, from which a tenant's specs are lowered
USED_MEMORY_S = 40.0  # the time constant of "lately": 5% of a core at all times is USED_S


@dataclass(eq=False)
class PendingSpec:
    """A spec and the tenant of each ticket that waits for it.

    `owner`: the tenant that is charged for it. `is_small`: it is compiled in the small queue. `answer_by`: when it must
    have been answered (monotonic seconds), once it is being compiled. `gives_way`: it is being compiled while another
    tenant waits that was served less. `is_stopped`: its worker does not run, since another one took its place.
    `is_lowered`: its worker only gets the processor time that nothing else wants. `is_raised`: it was lowered, and is
    so no more. `cpu_s`: the CPU seconds that workers have spent on it and that are not charged yet. `is_done`: it has
    been answered, or has no tickets any more.
    """

    spec: Spec
    owner: str
    num_bytes: int
    is_small: bool
    tickets: dict[int, str] = field(default_factory=dict)
    answer_by: float = math.inf
    gives_way: bool = False
    is_stopped: bool = False
    is_lowered: bool = False
    is_raised: bool = False
    cpu_s: float = 0.0
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
    """The queues of small, large and lowered specs. Tenants share the workers by weight and by time.

    A spec that was taken from a queue holds a worker until `settle` finds that it has ended, or that it gives way to a
    spec of the same queue: a tenant that was served less does not wait until an expensive spec has ended. Nothing gives
    way in the queue of lowered specs, which are those of tenants that have used much CPU time lately.

    At most `num_workers` specs that are not lowered run at once. Of several workers, one is reserved for small specs;
    a single one has no lowered specs.
    """

    def __init__(self, num_workers: int, weights: Mapping[str, float] | None = None) -> None:
        self.is_beside_others: Callable[[str], bool] = lambda tenant: False  # whether others want the processor
        self.num_workers = num_workers
        self._shares, self._used = TenantShares(weights), TenantShares(weights, USED_MEMORY_S)
        self._small, self._large = TenantQueue[PendingSpec](self._shares), TenantQueue[PendingSpec](self._shares)
        self._lowered = TenantQueue[PendingSpec](self._shares)
        self._queues = self._small, self._large, self._lowered
        self._begun: dict[PendingSpec, tuple[str, float]] = {}  # (tenant, monotonic seconds)

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, pending: object) -> bool:
        return any(pending in queue for queue in self._queues)

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
        for queue in self._queues:
            queue.discard(pending, tenant)

    def may_run_large(self, running: Collection[PendingSpec]) -> bool:
        """Whether a large spec may run beside those that run."""
        num_large = sum(not pending.is_small and not pending.is_lowered for pending in running)
        return num_large < max(1, self.num_workers - 1)

    def pop(self, running: Collection[PendingSpec], now: float) -> PendingSpec | None:
        """Removes and returns the next spec that is not lowered and may run beside `running`: a large one if it may be,
        else a small one. None if there is none."""
        if sum(not pending.is_lowered for pending in running) >= self.num_workers:
            return None
        return self._pop(self._large if len(self._large) and self.may_run_large(running) else self._small, now)

    def pop_lowered(self, now: float) -> PendingSpec | None:
        """Removes and returns the next lowered spec, if there is one."""
        return self._pop(self._lowered, now)

    def _pop(self, queue: TenantQueue[PendingSpec], now: float) -> PendingSpec | None:
        if not len(queue):
            return None
        tenant, pending = queue.pop(now)
        self.discard(pending)
        self._shares.take(tenant)
        self._begun[pending] = tenant, now
        pending.gives_way = pending.is_stopped = False
        pending.is_lowered = queue is self._lowered
        pending.is_small = pending.is_small and not pending.is_lowered
        return pending

    def charge(self, tenant: str, cpu_s: float, now: float) -> None:
        """Counts CPU seconds that were spent on a tenant's specs."""
        self._used.charge(tenant, cpu_s, now)

    def is_lowered(self, tenant: str, now: float) -> bool:
        """Whether a tenant has used so much CPU time lately that its specs do not come before the work of others."""
        has_used_much = self.num_workers > 1 and self._used.service(tenant, now) > USED_S
        return has_used_much and self.is_beside_others(tenant)

    def may_lower(self, pending: PendingSpec, now: float) -> bool:
        """Whether all tenants that wait for a spec are lowered, and it was not raised."""
        return not pending.is_raised and all(self.is_lowered(name, now) for name in {*pending.tickets.values()})

    def may_raise(self, pending: PendingSpec, now: float) -> bool:
        """Whether a spec is lowered, running or queued, although a tenant waits for it that is not."""
        return (pending.is_lowered or pending in self._lowered) and not self.may_lower(pending, now)

    def lower(self, now: float) -> None:
        """Moves the specs that only lowered tenants wait for to their queue, and back when they no longer are."""
        for queue in (self._small, self._large):
            for tenant in [tenant for tenant in queue.tenants if self.is_lowered(tenant, now)]:
                for pending in queue.items_of(tenant):
                    if self.may_lower(pending, now):
                        queue.discard(pending, tenant)
                        self._lowered.put(tenant, pending)
        for tenant in [tenant for tenant in self._lowered.tenants if not self.is_lowered(tenant, now)]:
            for pending in self._lowered.items_of(tenant):
                self._lowered.discard(pending, tenant)
                self.put(pending, tenant)

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
                self.charge(tenant, pending.cpu_s, now)
                pending.cpu_s = 0.0
        for pending, (tenant, _) in self._begun.items():
            queue = self._small if pending.is_small else self._large
            other = queue.next_tenant(now)
            if other is None or pending.is_stopped or pending.is_lowered:
                pending.gives_way = False
            else:
                ahead = self._shares.service(tenant, now) - self._shares.service(other, now)
                pending.gives_way = other != tenant and ahead > GIVE_WAY_S
