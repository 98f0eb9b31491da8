"""Weighted shares of tenants in what they use together: rows of a batch, waiting calls, compile workers, uploads.

One rule decides everywhere: the next unit goes to the tenant that holds the fewest units for its weight; among equals
to the one that had the least service for its weight lately. With n tenants that always want more, each so gets 1/n of
the units, and a tenant that arrives gets its part as soon as units are free. Service is what the caller counts (tokens,
seconds), and is forgotten with time: `exp(-t / memory_s)` of it counts after t seconds. So neither idling nor an empty
server earns credit for longer.

The module knows no clock: every method that needs the time gets it, so that it can be simulated. It stands in the
lowest folder, since the scheduler, the HTTP server and the compile workers all use it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

MEMORY_S = 2.0  # the time constant in which service is forgotten, if the caller names no other one
MAX_IDLE_ACCOUNTS = 4096  # accounts of tenants that hold nothing

Item = TypeVar("Item")
Order = tuple[float, float]


@dataclass(slots=True)
class Account:
    """Of one tenant. held: units. service: received until `updated`, with what is forgotten taken off."""

    weight: float
    held: int = 0
    service: float = 0.0
    updated: float = 0.0


class TenantShares:
    """The accounts of all tenants in one kind of unit.

    >>> shares = TenantShares({"b": 2.0})
    >>> for tenant in ("a", "a", "b", "b"):
    ...     shares.take(tenant)
    >>> min(["a", "b"], key=lambda tenant: shares.order(tenant, now=0.0))
    'b'
    """

    def __init__(self, weights: Mapping[str, float] | None = None, memory_s: float = MEMORY_S) -> None:
        self._weights = weights or {}  # of tenants; 1 for others
        self._memory_s = memory_s
        self._accounts: dict[str, Account] = {}
        self._num_idle = 0

    def held(self, tenant: str) -> int:
        """The units that a tenant holds."""
        account = self._accounts.get(tenant)
        return account.held if account is not None else 0

    def holders(self) -> list[str]:
        """The tenants that hold units."""
        return [tenant for tenant, account in self._accounts.items() if account.held]

    def take(self, tenant: str, num_units: int = 1) -> None:
        """Gives units to a tenant; a negative number takes them back."""
        account = self._account(tenant)
        self._num_idle += (account.held + num_units == 0) - (account.held == 0)
        account.held += num_units
        assert account.held >= 0

    def charge(self, tenant: str, amount: float, now: float) -> None:
        """Counts service that a tenant receives at time `now` (seconds)."""
        account = self._account(tenant)
        if now > account.updated:
            account.service, account.updated = self._left(account, now), now
        account.service += amount

    def order(self, tenant: str, now: float, num_more: int = 0) -> Order:
        """The sort key of a tenant's next unit, after `num_more` others: the smallest key goes first."""
        account = self._accounts.get(tenant)
        if account is None:
            return num_more / self.weight(tenant), 0.0
        return (account.held + num_more) / account.weight, self._left(account, now) / account.weight

    def service(self, tenant: str, now: float) -> float:
        """The service for its weight that a tenant has received lately."""
        return self.order(tenant, now)[1]

    def weight(self, tenant: str) -> float:
        """The weight of a tenant."""
        return self._weights.get(tenant, 1.0)

    def most_above(self, tenant: str, holders: Iterable[str]) -> str | None:
        """The one of `holders` that gives up a unit to `tenant`: of those with two or more, the one with the most for
        its weight.

        None if it would then have fewer than `tenant`, for their weights, and `tenant` has one. So units do not go to
        and fro, a tenant with one unit keeps it, and one without a unit gets one, however small its weight is.
        """
        several = [other for other in holders if self.held(other) >= 2]
        most = max(several, key=lambda other: self.held(other) / self.weight(other), default=None)
        if most is None or not self.held(tenant):
            return most
        after = (self.held(most) - 1) / self.weight(most)
        return most if (self.held(tenant) + 1) / self.weight(tenant) <= after else None

    def ahead(self, tenant: str, num_units: float) -> float:
        """The units that are held and come before the tenant has `num_units` more of them, these included.

        Of another tenant at most as many count as `tenant` has for their weights, and none before its first unit. So a
        bound on this number refuses no tenant because of what others hold beyond their shares. Tenants of equal weight
        that reach the bound one after the other hold at most 1 + 1/2 + ... + 1/n times the bound together.
        """
        own = self.held(tenant) + num_units
        if own <= 1:
            return own
        per_weight = own / self.weight(tenant)
        others = (other for other in self._accounts.items() if other[0] != tenant)
        return own + sum(min(account.held, per_weight * account.weight) for _, account in others)

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(self.weight(tenant))
            self._num_idle += 1
            if self._num_idle > MAX_IDLE_ACCOUNTS:  # the oldest account is dropped
                del self._accounts[next(name for name, account in self._accounts.items() if not account.held)]
                self._num_idle -= 1
        return account

    def _left(self, account: Account, now: float) -> float:
        return account.service * math.exp(min(0.0, account.updated - now) / self._memory_s)


class TenantQueue(Generic[Item]):
    """Items that wait for a unit of `shares`, first come first served within a tenant.

    An item may wait for several tenants; `pop` and `discard` remove it for all of them. Among equal tenants the one
    goes first that was served longest ago. The caller tells `shares` of the units that it gives out.

    >>> queue = TenantQueue[str](TenantShares())
    >>> for tenant, item in (("a", "a1"), ("a", "a2"), ("b", "b1")):
    ...     queue.put(tenant, item)
    >>> [queue.pop(0.0)[1] for _ in range(len(queue))]
    ['a1', 'b1', 'a2']
    """

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._waiting: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()  # the tenant served last at the end
        self._tenants: dict[Item, set[str]] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, item: object) -> bool:
        return item in self._tenants

    @property
    def tenants(self) -> list[str]:
        """The tenants that have items."""
        return list(self._waiting)

    def num_of(self, tenant: str) -> int:
        """The number of items that wait for a tenant."""
        return len(self._waiting.get(tenant, ()))

    def items_of(self, tenant: str) -> list[Item]:
        """The items that wait for a tenant, the oldest first."""
        return list(self._waiting.get(tenant, ()))

    def put(self, tenant: str, item: Item, *, first: bool = False) -> None:
        """Adds an item at the end of its tenant's items, or before them if `first`."""
        items = self._waiting.setdefault(tenant, OrderedDict())
        items[item] = None
        if first:
            items.move_to_end(item, last=False)
        self._tenants.setdefault(item, set()).add(tenant)

    def next_tenant(self, now: float) -> str | None:
        """The tenant whose item `pop` returns; None if no item waits."""
        return min(self._waiting, key=lambda tenant: self._shares.order(tenant, now), default=None)

    def oldest(self, tenant: str) -> Item:
        """The first item of a tenant that has one."""
        return next(iter(self._waiting[tenant]))

    def pop(self, now: float, *, newest: bool = False) -> tuple[str, Item]:
        """Removes the oldest or `newest` item of the next tenant; returns tenant and item. Raises KeyError if empty."""
        tenant = self.next_tenant(now)
        if tenant is None:
            raise KeyError("the queue is empty")
        item = next(reversed(self._waiting[tenant])) if newest else self.oldest(tenant)
        self._waiting.move_to_end(tenant)
        self.discard(item)
        return tenant, item

    def discard(self, item: Item, tenant: str | None = None) -> None:
        """Removes an item for `tenant`, or for all tenants; does nothing if it is not queued."""
        tenants = self._tenants.get(item, set())
        for name in [name for name in tenants if tenant in (None, name)]:
            tenants.remove(name)
            items = self._waiting[name]
            del items[item]
            if not items:
                del self._waiting[name]
        if not tenants:
            self._tenants.pop(item, None)
