"""Who goes first: what tenants and programs were served so far, and the rank of a row that follows from it.

    fair         the tenant served least so far (virtual token counter, Sheng et al. 2024, arXiv 2401.00588), then
                 priority, then the program served least (least attained service over whole programs, Autellix,
                 arXiv 2502.13965), in doubling levels so that equals do not take turns with every token
    first-come   the call that came first, as most servers do

Levels order those that wait. Tiers, which are wider, also let a row go before one that runs already. A program that
nobody served for long goes first, whatever it had; the more it had, the longer that takes.

A tenant that comes, or comes back, is lifted to the least of the counters of those that are here, or to that of who
left last: it has saved up nothing. One that comes back may keep as much as ranks do not tell, a level: a client that
posts a call when it has the answer to the one before would lose so much with each.

Knows: tokens served, times. Must not know: pages, batches, what a row computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.runtime.batch.request import Request
from plait.runtime.config import SchedulingOrder

STARVATION_S = 10.0  # of a new program; each level of service adds as much. Then it is also left alone for so long
MAX_INACTIVE_TENANTS = 4096  # tenants without rows whose service is remembered
LEVEL_TOKENS = 256  # programs within one doubling of this much service count as equal
TIER_TOKENS = 2048  # service that no other program interrupts; each tier after it is 2**TIER_BITS times as long
TIER_BITS = 3
Rank = tuple[int, bool, int, int]
ProgramId = tuple[bytes, int]


@dataclass(slots=True)
class TenantAccount:
    """The counter of a tenant that has rows: what it was served, or lifted to."""

    served: int
    num_requests: int = 0


@dataclass(slots=True)
class ProgramAccount:
    """What one program was served, when it was last, and until when nothing may interrupt it."""

    served: int = 0
    last_served: float = 0.0
    protected_until: float = 0.0

    @property
    def level(self) -> int:
        return (self.served // LEVEL_TOKENS).bit_length()

    def is_starving(self, now: float, arrival_time: float) -> bool:
        """Whether a row that came at `arrival_time` has waited longer than what the program was served allows."""
        waited = now - max(self.last_served, arrival_time)
        return waited > STARVATION_S and waited > STARVATION_S * (1 + self.level)


class Fairness:
    """The accounts of all tenants and programs with rows or sessions."""

    def __init__(self, order: SchedulingOrder = "fair") -> None:
        self.order = order
        self._tenants: dict[str, TenantAccount] = {}  # those that have rows
        self._inactive_tenants: dict[str, int] = {}  # the counters of those that have none, the longest away first
        self._last_inactive_counter = 0  # its counter
        self._counter_floor = (
            0  # what newcomers are lifted to; it never sinks, so those that keep a level do not add up
        )
        self._programs: dict[ProgramId, ProgramAccount] = {}
        self._arrivals = 0

    # -- accounts ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """The row has come to wait for the first time."""
        self._arrivals += 1
        request.arrival_index = self._arrivals
        name = request.session.open_message.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            least = min((each.served for each in self._tenants.values()), default=self._last_inactive_counter)
            self._counter_floor = max(self._counter_floor, least)
            known = self._inactive_tenants.pop(name, None)
            served = self._counter_floor if known is None else max(known, self._counter_floor - LEVEL_TOKENS)
            tenant = self._tenants[name] = TenantAccount(served)
        tenant.num_requests += 1
        request.tenant, request.account = tenant, self._programs.setdefault(request.session.program, ProgramAccount())

    def remove(self, request: Request) -> None:
        """The row is over."""
        request.tenant.num_requests -= 1
        if not request.tenant.num_requests:
            name = request.session.open_message.tenant
            del self._tenants[name]
            self._inactive_tenants[name] = self._last_inactive_counter = request.tenant.served
            if len(self._inactive_tenants) > MAX_INACTIVE_TENANTS:
                del self._inactive_tenants[next(iter(self._inactive_tenants))]

    def forget_program(self, program: ProgramId) -> None:
        """The program's last session is gone."""
        self._programs.pop(program, None)

    def charge(self, request: Request, num_tokens: int, now: float) -> None:
        """Tokens of the row go through the model at time `now`."""
        request.tenant.served += num_tokens
        account = request.account
        if now - account.last_served > STARVATION_S and account.is_starving(now, request.metrics.arrival_time):
            account.protected_until = now + STARVATION_S
        account.served += num_tokens
        account.last_served = now

    # -- who goes first ---------------------------------------------------------------------------

    def rank(self, request: Request, now: float) -> Rank:
        """The less, the sooner. Rows of equal rank go by cached prefix, then by arrival."""
        if self.order == "first-come":
            return (0, False, request.arrival_index, 0)
        tenant = request.tenant.served // LEVEL_TOKENS
        if self.is_starving(request, now):
            return (tenant, False, request.arrival_index, 0)
        return (tenant, True, -request.session.open_message.priority, request.account.level)

    def is_starving(self, request: Request, now: float) -> bool:
        """Whether the row's program has waited so long that what it was served counts no more."""
        return request.account.is_starving(now, request.metrics.arrival_time)

    def tier(self, request: Request, now: float) -> int:
        """0 for a row that no other may go before once it runs: what its program was served is little, or it has
        waited too long already."""
        account = request.account
        if self.order == "first-come" or now < account.protected_until or self.is_starving(request, now):
            return 0
        return -(-(account.served // TIER_TOKENS).bit_length() // TIER_BITS)

    def preemption_key(self, request: Request, now: float) -> tuple[int, int]:
        """Of several rows that may be interrupted the one of the largest is: its tier, then what its program had."""
        return self.tier(request, now), request.account.served

    def may_interrupt(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether `waiting` may go before `running`, which has begun."""
        if self.tier(waiting, now) >= self.tier(running, now):
            return False
        return self.rank(waiting, now) < self.rank(running, now)
