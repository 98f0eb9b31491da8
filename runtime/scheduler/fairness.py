"""Who goes first: what tenants and programs were served so far, and the rank of a row that follows from it.

    fair         the tenant served least so far (virtual token counter, Sheng et al. 2024, arXiv 2401.00588), then
                 priority, then the program served least (least attained service over whole programs, Autellix,
                 arXiv 2502.13965), in doubling levels so that equals do not take turns with every token
    first-come   the call that came first, as most servers do

Levels order those that wait. Tiers, which are wider, also let a row go before one that runs already. A program that
nobody served for long goes first, whatever it had; the more it had, the longer that takes.

Knows: tokens served, times. Must not know: pages, batches, what a row computes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from plait.runtime.config import Order
from plait.runtime.scheduler.rows import Row

STARVING_S = 10.0  # of a new program; each level of service adds as much. Then it is also left alone for so long
MAX_AWAY = 4096  # tenants without rows whose service is remembered
LEVEL_TOKENS = 256  # programs within one doubling of this much service count as equal
TIER_TOKENS = 2048  # service that no other program interrupts; each tier after it is 2**TIER_BITS times as long
TIER_BITS = 3
Rank = tuple[int, bool, int, int]
ProgramId = tuple[bytes, int]


@dataclass(slots=True)
class Account:
    """What one program was served, when it was last, and until when nothing may interrupt it."""

    served: int = 0
    last: float = 0.0
    protected_until: float = 0.0

    @property
    def level(self) -> int:
        return (self.served // LEVEL_TOKENS).bit_length()

    def is_starving(self, now: float, arrived: float) -> bool:
        """Whether a row that came at `arrived` has waited longer than what the program was served allows."""
        waited = now - max(self.last, arrived)
        return waited > STARVING_S and waited > STARVING_S * (1 + self.level)


class Fairness:
    """The accounts of all tenants and programs with rows or sessions."""

    def __init__(self, order: Order = "fair") -> None:
        self.order = order
        self._tenant_rows: Counter[str] = Counter()
        self._tenant_served: dict[str, int] = {}  # of the tenants that have rows
        self._tenants_away: dict[str, int] = {}  # what those without rows were served, the longest away first
        self._programs: dict[ProgramId, Account] = {}
        self._arrivals = 0

    # -- accounts ---------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        """The row has come to wait for the first time."""
        self._arrivals += 1
        row.arrival = self._arrivals
        tenant = row.session.opened.tenant
        if tenant not in self._tenant_rows:  # one that comes back has saved up nothing while it was away, and owes
            least = min(self._tenant_served.values(), default=0)
            self._tenant_served[tenant] = max(least, self._tenants_away.pop(tenant, 0))
        self._tenant_rows[tenant] += 1

    def remove(self, row: Row) -> None:
        """The row is over."""
        tenant = row.session.opened.tenant
        self._tenant_rows[tenant] -= 1
        if not self._tenant_rows[tenant]:
            del self._tenant_rows[tenant]
            self._tenants_away[tenant] = self._tenant_served.pop(tenant)
            if len(self._tenants_away) > MAX_AWAY:
                del self._tenants_away[next(iter(self._tenants_away))]

    def forget_program(self, program: ProgramId) -> None:
        """The program's last session is gone."""
        self._programs.pop(program, None)

    def charge(self, row: Row, num_tokens: int, now: float) -> None:
        """Tokens of the row go through the model at time `now`."""
        session = row.session
        self._tenant_served[session.opened.tenant] += num_tokens
        account = self._programs.get(session.program)
        if account is None:
            account = self._programs[session.program] = Account()
        if account.is_starving(now, row.meter.arrived):
            account.protected_until = now + STARVING_S
        account.served += num_tokens
        account.last = now

    # -- who goes first ---------------------------------------------------------------------------

    def rank(self, row: Row, now: float) -> Rank:
        """The less, the sooner. Rows of equal rank go by cached prefix, then by arrival."""
        if self.order == "first-come":
            return (0, False, row.arrival, 0)
        tenant = self._tenant_served[row.session.opened.tenant] // LEVEL_TOKENS
        if self.is_starving(row, now):
            return (tenant, False, row.arrival, 0)
        return (tenant, True, -row.session.opened.priority, self._account(row).level)

    def is_starving(self, row: Row, now: float) -> bool:
        """Whether the row's program has waited so long that what it was served counts no more."""
        return self._account(row).is_starving(now, row.meter.arrived)

    def tier(self, row: Row, now: float) -> int:
        """0 for a row that no other may go before once it runs: what its program was served is little, or it has
        waited too long already."""
        account = self._account(row)
        if self.order == "first-come" or now < account.protected_until or self.is_starving(row, now):
            return 0
        return -(-(account.served // TIER_TOKENS).bit_length() // TIER_BITS)

    def weight(self, row: Row, now: float) -> tuple[int, int]:
        """Of several rows that may be interrupted the one of the largest is: its tier, then what its program had."""
        return self.tier(row, now), self._account(row).served

    def may_interrupt(self, waiting: Row, running: Row, now: float) -> bool:
        """Whether `waiting` may go before `running`, which has begun."""
        if self.tier(waiting, now) >= self.tier(running, now):
            return False
        return self.rank(waiting, now) < self.rank(running, now)

    def _account(self, row: Row) -> Account:
        return self._programs.get(row.session.program, _NEW)


_NEW = Account()  # of programs that were not served yet; nobody writes to it
