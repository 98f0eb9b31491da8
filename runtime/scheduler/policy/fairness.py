"""Ranks requests by how much service their tenants and programs have received.

    fair         tenants share the rows and the tokens by weight (constrained/tenant_shares.py). Among the requests of
                 one tenant: the higher priority, then the program with the least service (least attained service over
                 whole programs, Autellix, arXiv 2502.13965), in levels that double so that equal programs do not
                 alternate
    first-come   the oldest call first, as most servers do: all requests are in one queue

In both orders background requests come last, may be interrupted by all others, and are counted apart: what a tenant has
computed in the background does not set back its other requests.

Service is counted in tokens that went through the model; what a tenant gets while no other has requests is not counted
for tenants, so that it is not held against it when others come. While all rows are taken, a waiting request gets one
- from a tenant that is above its share, which gives up its newest request;
- from another program of its tenant: levels rank waiting requests, and tiers, which are wider, interrupt running ones;
- from a tenant with one row, if its own has none: there are more tenants than rows, which then take turns.

A program without service for long (starving) goes first within its tenant; the more service it had, the longer it takes
to starve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.constrained.tenant_shares import Order, TenantShares
from plait.runtime.batch.request import ProgramId, Request
from plait.runtime.config import SchedulingOrder

STARVATION_S = 10.0  # until a new program starves, more with each level; also how long it is then protected
LEVEL_TOKENS = 256  # programs within one doubling of this much service rank as equal
TIER_TOKENS = 2048  # service up to which no other program interrupts; each next tier is 2**TIER_BITS times as long
TIER_BITS = 3
TURN_TOKENS = 16  # output tokens of a row of a tenant with weight 1, before a tenant without a row may take it
PROMPT_TOKENS = 8  # that cost about as much as an output token, where many are computed together
BACKGROUND_TIER = 1 << 10  # above that of any amount of service
Rank = tuple[bool, int, int]
Queue = tuple[bool, str]  # (is_background, tenant)


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


@dataclass(slots=True)
class RequestAccount:
    """A request's queue and program, and the tokens that it has computed since it got its row.

    A turn has an output token for every PROMPT_TOKENS prompt tokens that it had to compute, and that the next one may
    have to compute again: so turns cost at most about half of the work, however few pages there are.
    """

    queue: Queue
    program: ProgramAccount
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0

    def has_had_turn(self, weight: float) -> bool:
        """Whether a tenant without a row may have this one."""
        return self.num_output_tokens >= max(TURN_TOKENS * weight, self.num_prompt_tokens / PROMPT_TOKENS)


class Fairness:
    """The accounts of all tenants and programs that have requests or sessions. All times are monotonic seconds."""

    def __init__(self, order: SchedulingOrder = "fair", weights: Mapping[str, float] | None = None) -> None:
        self.order = order
        self._shares = TenantShares(weights), TenantShares(weights)  # by is_background; the units are rows
        self._accounts: dict[Request, RequestAccount] = {}  # from `add` to `remove`
        self._num_requests = Counter[str](), Counter[str]()  # of each tenant that has some, by is_background
        self._programs: dict[ProgramId, ProgramAccount] = {}
        self._num_arrivals = 0

    # -- accounts ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Registers a request that starts to wait for the first time, and sets its `arrival_index`."""
        self._num_arrivals += 1
        request.arrival_index = self._num_arrivals
        owner = request.owner
        queue = owner.is_background, owner.tenant if self.order == "fair" else ""
        self._accounts[request] = RequestAccount(queue, self._programs.setdefault(owner.program_id, ProgramAccount()))
        self._num_requests[queue[0]][queue[1]] += 1

    def remove(self, request: Request) -> None:
        """Unregisters a request that has ended. It holds no row any more."""
        is_background, tenant = self._accounts.pop(request).queue
        num_requests = self._num_requests[is_background]
        num_requests[tenant] -= 1
        if not num_requests[tenant]:
            del num_requests[tenant]

    @property
    def is_mixed(self) -> bool:
        """Whether there are requests of both kinds: in the background, and others."""
        return all(self._num_requests)

    def forget_program(self, program_id: ProgramId) -> None:
        """Drops the account of a program whose last session is gone."""
        self._programs.pop(program_id, None)

    def begin_turn(self, request: Request) -> None:
        """Counts the row that a request gets."""
        account = self._accounts[request]
        account.num_output_tokens = account.num_prompt_tokens = 0
        self.hold_row(request, 1)

    def hold_row(self, request: Request, num_rows: int) -> None:
        """Counts a row that the request gives up (-1), or has still (1)."""
        is_background, tenant = self._accounts[request].queue
        self._shares[is_background].take(tenant, num_rows)

    def charge(self, request: Request, num_tokens: int, now: float) -> None:
        """Charges tokens of the request that go through the model at time `now`."""
        account = self._accounts[request]
        is_background, tenant = account.queue
        if len(self._num_requests[is_background]) > 1:
            self._shares[is_background].charge(tenant, num_tokens, now)
        if num_tokens == 1 or request.num_draft_tokens:
            account.num_output_tokens += 1
        else:
            account.num_prompt_tokens += num_tokens
        program = account.program
        if now - program.last_served > STARVATION_S and program.is_starving(now, request.metrics.arrival_time):
            program.protected_until = now + STARVATION_S
        program.served += num_tokens
        program.last_served = now

    # -- ranks ------------------------------------------------------------------------------------

    def queue(self, request: Request) -> Queue:
        """The queue that the request waits in, of its tenant."""
        return self._accounts[request].queue

    def weight(self, tenant: str) -> float:
        """The weight of a tenant."""
        return self._shares[False].weight(tenant)

    def order_of(self, queue: Queue, now: float, num_more: int = 0) -> Order:
        """The sort key of a queue's next request, after `num_more` others of it; the smallest goes first."""
        is_background, tenant = queue
        return self._shares[is_background].order(tenant, now, num_more)

    def rank(self, request: Request, now: float) -> Rank:
        """The sort key of a waiting request in its queue. Ties: by cached prefix, then by arrival."""
        if self.order == "first-come" or self.is_starving(request, now):
            return (False, request.arrival_index, 0)
        return (True, -request.owner.priority, self._accounts[request].program.level)

    def share_key(self, request: Request, now: float) -> tuple[bool, float]:
        """The sort key of running requests that share a part of a step: the tenant with the least service first."""
        is_background, tenant = self._accounts[request].queue
        return is_background, self._shares[is_background].service(tenant, now)

    def program_service(self, request: Request) -> int:
        """The tokens that the request's program has computed; its arrival in the order "first-come"."""
        return request.arrival_index if self.order == "first-come" else self._accounts[request].program.served

    def is_starving(self, request: Request, now: float) -> bool:
        """Whether the request's program has waited so long that its past service no longer counts."""
        return self._accounts[request].program.is_starving(now, request.metrics.arrival_time)

    def tier(self, request: Request, now: float) -> int:
        """The tier of a request; one of tier 0 is never interrupted for another program.

        Tier 0: the program has little service, or is protected, or starves. Background requests have the highest tier.
        """
        if request.owner.is_background:
            return BACKGROUND_TIER
        program = self._accounts[request].program
        if self.order == "first-come" or now < program.protected_until or self.is_starving(request, now):
            return 0
        return -(-(program.served // TIER_TOKENS).bit_length() // TIER_BITS)

    # -- interruptions ----------------------------------------------------------------------------

    def may_interrupt(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether `waiting` may run before `running`, of another queue or of the same one, continues its prompt."""
        if self.queue(waiting) != self.queue(running):
            return self.share_key(waiting, now) < self.share_key(running, now)
        return self._is_shorter(waiting, running, now)

    def _is_shorter(self, waiting: Request, running: Request, now: float) -> bool:
        if self.tier(waiting, now) >= self.tier(running, now):
            return False
        return self.rank(waiting, now) < self.rank(running, now)

    def giver(self, queue: Queue, rows: Mapping[Queue, Sequence[Request]], now: float) -> Request | None:
        """The running request that gives its row to the next one of `queue`, if one of the three rules holds that do
        not depend on programs: background, shares, turns. rows: the running requests, the newest last."""
        is_background, tenant = queue
        if not is_background:
            for (other_is_background, _), requests in rows.items():
                if other_is_background and requests:
                    return requests[-1]
        shares = self._shares[is_background]
        holders = [name for (background, name), requests in rows.items() if background == is_background and requests]
        most = shares.most_above(tenant, holders)
        if most is not None:
            return rows[is_background, most][-1]
        if shares.held(tenant):
            return None
        ended_turns = [
            (shares.service(name, now), request.arrival_index, request)
            for name in holders
            for request in rows[is_background, name]
            if self._accounts[request].has_had_turn(shares.weight(name))
        ]
        service, _, request = max(ended_turns, default=(0.0, 0, None))
        return request if service > shares.service(tenant, now) else None

    def longer(self, waiting: Request, rows: Sequence[Request], now: float) -> Request | None:
        """The running request of the same tenant that is interrupted for `waiting`, whose program is shorter."""
        longest = max(
            rows, key=lambda request: (self.tier(request, now), self._accounts[request].program.served), default=None
        )
        return longest if longest is not None and self._is_shorter(waiting, longest, now) else None
