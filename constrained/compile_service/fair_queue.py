"""A queue that serves its tenants in turn, one item each."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Round robin over tenants, first come first served within a tenant.

    A tenant without items loses its turn and joins the end of the round when it has one again. So an item at the front
    of its tenant's items waits for at most one item of every other tenant. An item may wait for several tenants; `pop`
    and `discard` remove it for all of them.

    >>> queue = FairQueue[str]()
    >>> for tenant, item in (("a", "a1"), ("a", "a2"), ("b", "b1")):
    ...     queue.put(tenant, item)
    >>> [queue.pop() for _ in range(len(queue))]
    ['a1', 'b1', 'a2']
    """

    def __init__(self) -> None:
        self._rounds: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()  # the next tenant first
        self._tenants: dict[Item, set[str]] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, item: object) -> bool:
        return item in self._tenants

    def put(self, tenant: str, item: Item, *, first: bool = False) -> None:
        """Adds an item at the end of its tenant's items, or before them if `first`."""
        items = self._rounds.setdefault(tenant, OrderedDict())
        items[item] = None
        if first:
            items.move_to_end(item, last=False)
        self._tenants.setdefault(item, set()).add(tenant)

    def pop(self) -> Item:
        """Removes and returns the next item. Raises KeyError if the queue is empty."""
        tenant = next(iter(self._rounds), None)
        if tenant is None:
            raise KeyError("the queue is empty")
        item = next(iter(self._rounds[tenant]))
        self._rounds.move_to_end(tenant)
        self.discard(item)
        return item

    def discard(self, item: Item, tenant: str | None = None) -> None:
        """Removes an item for `tenant`, or for all tenants; does nothing if it is not queued."""
        tenants = self._tenants.get(item, set())
        for name in [name for name in tenants if tenant in (None, name)]:
            tenants.remove(name)
            items = self._rounds[name]
            del items[item]
            if not items:
                del self._rounds[name]
        if not tenants:
            self._tenants.pop(item, None)
