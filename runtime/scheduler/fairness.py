"""Ranks requests by how much service their tenants and programs have received.

    fair         the tenant with the least service first (virtual token counter, Sheng et al. 2024, arXiv 2401.00588),
                 then the higher priority, then the program with the least service (least attained service over whole
                 programs, Autellix, arXiv 2502.13965), in levels that double so that equal programs do not alternate
    first-come   the oldest call first, as most servers do

In both orders background requests come last, may be interrupted by all others, and are counted apart: what a tenant has
computed in the background does not set back its other requests.

Service is counted in tokens that went through the model. Levels rank waiting requests. Tiers are wider: a waiting
request of a lower tier may interrupt a running one. A program without service for long (starving) goes first; the more
service it had, the longer it takes to starve.

A tenant that arrives or returns is raised to the active minimum of the counters (or to the counter of the tenant that
left last), so idling earns no credit. A returning tenant may stay one level below that minimum: a client that sends
each call after the answer to the one before would otherwise lose up to a level with every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.runtime.batch.request import ProgramId, Request
from plait.runtime.config import SchedulingOrder

STARVATION_S = 10.0  # until a new program starves, more with each level; also how long it is then protected
MAX_INACTIVE_TENANTS = 4096  # tenants without requests whose counter is remembered
LEVEL_TOKENS = 256  # programs within one doubling of this much service rank as equal
TIER_TOKENS = 2048  # service up to which no other program interrupts; each next tier is 2**TIER_BITS times as long
TIER_BITS = 3
BACKGROUND_TIER = 1 << 10  # above that of any amount of service
Rank = tuple[bool, int, bool, int, int]
TenantKey = tuple[str, bool]  # (tenant, is_background)


@dataclass(slots=True)
class TenantAccount:
    """The counter of a tenant that has requests: the service it received, or the minimum it was raised to.

    A tenant of weight w is charged 1/w for a token, so that it gets w times as many as one of weight 1.
    """

    served: float
    weight: float = 1.0
    num_requests: int = 0


@dataclass(slots=True)
class ProgramAccount:
    """A program's service in tokens, when it was last served, and until when no other program may interrupt it."""

    served: int = 0
    last_served: float = 0.0
    protected_until: float = 0.0

    @property
    def level(self) -> int:
        """0 up to LEVEL_TOKENS of service, then one more with each doubling."""
        return (self.served // LEVEL_TOKENS).bit_length()

    def is_starving(self, now: float, arrival_time: float) -> bool:
        """Whether a request that arrived at `arrival_time` has waited longer than the program's service allows."""
        waited = now - max(self.last_served, arrival_time)
        return waited > STARVATION_S and waited > STARVATION_S * (1 + self.level)


class Fairness:
    """The accounts of all tenants and programs that have requests or sessions. All times are monotonic seconds."""

    def __init__(self, order: SchedulingOrder = "fair", weights: Mapping[str, float] | None = None) -> None:
        self.order = order
        self._weights = weights or {}  # of tenants; 1 for others
        self._accounts: dict[Request, tuple[TenantAccount, ProgramAccount]] = {}  # from `add` to `remove`
        self._tenants: dict[TenantKey, TenantAccount] = {}  # those that have requests
        self._inactive_tenants: dict[TenantKey, float] = {}  # counters of the others, the longest inactive first
        # Both by is_background: the counter of the tenant that left last, and what arriving tenants are raised to. That
        # never sinks, so kept levels do not add up.
        self._last_inactive_counters, self._counter_floors = [0.0, 0.0], [0.0, 0.0]
        self._programs: dict[ProgramId, ProgramAccount] = {}
        self._num_arrivals = 0

    # -- accounts ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Registers a request that starts to wait for the first time, and sets its `arrival_index`."""
        self._num_arrivals += 1
        request.arrival_index = self._num_arrivals
        owner = request.owner
        key = owner.tenant, owner.is_background
        tenant = self._tenants.get(key)
        if tenant is None:
            counter = self._inactive_tenants.pop(key, None)
            floor = self._raise_floor(owner.is_background)
            served = floor if counter is None else max(counter, floor - LEVEL_TOKENS)
            tenant = self._tenants[key] = TenantAccount(served, self._weights.get(owner.tenant, 1.0))
        tenant.num_requests += 1
        self._accounts[request] = tenant, self._programs.setdefault(owner.program_id, ProgramAccount())

    def _raise_floor(self, is_background: bool) -> float:
        """Returns the counter that a tenant which arrives now is raised to."""
        active = (account.served for (_, background), account in self._tenants.items() if background == is_background)
        minimum = min(active, default=self._last_inactive_counters[is_background])
        self._counter_floors[is_background] = max(self._counter_floors[is_background], minimum)
        return self._counter_floors[is_background]

    def remove(self, request: Request) -> None:
        """Unregisters a request that has ended."""
        tenant, _ = self._accounts.pop(request)
        tenant.num_requests -= 1
        if not tenant.num_requests:
            owner = request.owner
            key = owner.tenant, owner.is_background
            del self._tenants[key]
            self._inactive_tenants[key] = self._last_inactive_counters[owner.is_background] = tenant.served
            if len(self._inactive_tenants) > MAX_INACTIVE_TENANTS:
                del self._inactive_tenants[next(iter(self._inactive_tenants))]

    def forget_program(self, program_id: ProgramId) -> None:
        """Drops the account of a program whose last session is gone."""
        self._programs.pop(program_id, None)

    def charge(self, request: Request, num_tokens: int, now: float) -> None:
        """Charges tokens of the request that go through the model at time `now`."""
        tenant, program = self._accounts[request]
        tenant.served += num_tokens / tenant.weight
        if now - program.last_served > STARVATION_S and program.is_starving(now, request.metrics.arrival_time):
            program.protected_until = now + STARVATION_S
        program.served += num_tokens
        program.last_served = now

    # -- ranks ------------------------------------------------------------------------------------

    def rank(self, request: Request, now: float) -> Rank:
        """The sort key of a waiting request; the smallest goes first. Ties: by cached prefix, then by arrival."""
        is_background = request.owner.is_background
        if self.order == "first-come":
            return (is_background, 0, False, request.arrival_index, 0)
        tenant, program = self._accounts[request]
        tenant_level = int(tenant.served // LEVEL_TOKENS)
        if self.is_starving(request, now):
            return (is_background, tenant_level, False, request.arrival_index, 0)
        return (is_background, tenant_level, True, -request.owner.priority, program.level)

    def share_key(self, request: Request) -> tuple[bool, float, int]:
        """The sort key of running requests that share a part of a step: the tenant with the least service first."""
        is_background, arrival = request.owner.is_background, request.arrival_index
        if self.order == "first-come":
            return (is_background, 0.0, arrival)
        tenant, program = self._accounts[request]
        return (is_background, tenant.served, program.served)

    def is_starving(self, request: Request, now: float) -> bool:
        """Whether the request's program has waited so long that its past service no longer counts."""
        return self._accounts[request][1].is_starving(now, request.metrics.arrival_time)

    def tier(self, request: Request, now: float) -> int:
        """The tier of a request; one of tier 0 is never interrupted.

        Tier 0: the program has little service, or is protected, or starves. Background requests have the highest tier.
        """
        if request.owner.is_background:
            return BACKGROUND_TIER
        program = self._accounts[request][1]
        if self.order == "first-come" or now < program.protected_until or self.is_starving(request, now):
            return 0
        return -(-(program.served // TIER_TOKENS).bit_length() // TIER_BITS)

    def preemption_key(self, request: Request, now: float) -> tuple[int, int]:
        """The sort key of requests that may be interrupted: (tier, service). The largest is interrupted first."""
        return self.tier(request, now), self._accounts[request][1].served

    def may_interrupt(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether `waiting` may run before `running` continues."""
        if self.tier(waiting, now) >= self.tier(running, now):
            return False
        return self.rank(waiting, now) < self.rank(running, now)
