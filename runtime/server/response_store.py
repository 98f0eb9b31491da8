"""Responses that are kept in memory for a while, so that later requests can continue them.

A response holds what its request added to the conversation, and the response that it continues:

    "A" <- items of A <- items of B <- "B"        B continues A; when A is deleted or expires, its items stay for B
                      <- items of C <- "C"        and C

Each key has its own, bounded in bytes. If all keys together exceed the limit, the key that holds the most for its
weight loses its oldest response. The items of a conversation count once. The store is used from the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from plait.constrained.tenant_shares import TenantShares

OVERHEAD_BYTES = 1024  # of the Python objects of a response
ID_BYTES = 256  # of the place of an item


@dataclass(eq=False)
class StoredItems:
    """What one request added to a conversation, as JSON lists: `input` and `output`. previous: what is before them.

    ids: of these items. num_bytes: of these items; num_chain_bytes: with those before. num_users: responses and items
    that refer to it.
    """

    input: bytes
    output: bytes
    ids: tuple[str, ...]
    previous: StoredItems | None
    num_users: int = 0

    def __post_init__(self) -> None:
        self.num_bytes = len(self.input) + len(self.output) + OVERHEAD_BYTES + ID_BYTES * len(self.ids)
        self.num_chain_bytes: int = self.num_bytes + (self.previous.num_chain_bytes if self.previous else 0)

    def conversation(self) -> Iterator[bytes]:
        """Yields the JSON lists of all items, the oldest first."""
        chain: list[StoredItems] = []
        items: StoredItems | None = self
        while items is not None:
            chain.append(items)
            items = items.previous
        for items in reversed(chain):
            yield items.input
            yield items.output


@dataclass(frozen=True, eq=False)
class StoredResponse:
    """A response of the key `tenant`. body: the response object as JSON. end: by which it expires, in seconds."""

    id: str
    tenant: str
    body: bytes
    items: StoredItems
    end: float


class ResponseStore:
    """The stored responses of all keys.

    lifetime_s: for how long a response is kept. max_bytes: of all keys; max_bytes_per_key: of one. now: the clock.

    >>> store = ResponseStore(60, 10_000, 10_000)
    >>> store.add("resp_1", "key", b"{}", StoredItems(b"[]", b"[]", (), None)), store.get("resp_1", "other key")
    (True, None)
    """

    def __init__(
        self,
        lifetime_s: float,
        max_bytes: int,
        max_bytes_per_key: int,
        key_weights: Mapping[str, float] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lifetime_s, self.max_bytes = lifetime_s, max_bytes
        self.max_bytes_per_key = min(max_bytes, max_bytes_per_key)
        self._now = now
        self._timer: asyncio.TimerHandle | None = None  # one, however many responses there are
        self._responses: dict[str, StoredResponse] = {}  # the oldest first
        self._of_key: dict[str, dict[str, None]] = {}  # key -> its ids, the oldest first
        self._items: dict[tuple[str, str], StoredItems] = {}  # (key, id of an item) -> where it is
        self.held = TenantShares(key_weights)  # the units are bytes

    def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        """A response of this key; None if it has none with this id."""
        self.drop_expired()
        response = self._responses.get(response_id)
        return response if response is not None and response.tenant == tenant else None

    def items_with(self, item_id: str, tenant: str) -> StoredItems | None:
        """The items of this key of which one has this id; None if there are none."""
        self.drop_expired()
        return self._items.get((tenant, item_id))

    def add(self, response_id: str, tenant: str, body: bytes, items: StoredItems) -> bool:
        """Keeps a response, whose id is new. False if its conversation alone exceeds the limit of the key."""
        self.drop_expired()
        if len(body) + items.num_chain_bytes > self.max_bytes_per_key:
            return False
        end = self._now() + self.lifetime_s
        self._responses[response_id] = StoredResponse(response_id, tenant, body, items, end)
        self._of_key.setdefault(tenant, {})[response_id] = None
        self.held.take(tenant, len(body))
        self._use(items, tenant)
        while self.held.held(tenant) > self.max_bytes_per_key:
            self._drop_oldest(tenant)
        while sum(map(self.held.held, self._of_key)) > self.max_bytes:
            self._drop_oldest(max(self._of_key, key=lambda key: self.held.held(key) / self.held.weight(key)))
        return response_id in self._responses

    def delete(self, response: StoredResponse) -> None:
        """Forgets a response. Those that continue it keep its items."""
        del self._responses[response.id]
        ids = self._of_key[response.tenant]
        del ids[response.id]
        if not ids:
            del self._of_key[response.tenant]
        self.held.take(response.tenant, -len(response.body))
        self._release(response.items, response.tenant)

    def drop_expired(self) -> None:
        """Forgets the responses whose time is over."""
        while self._responses:
            oldest = next(iter(self._responses.values()))
            if oldest.end > self._now():
                break
            self.delete(oldest)

    def expire_in_time(self) -> None:
        """Forgets responses when their time is over, also if no request comes. Called in the event loop."""
        if self._timer is None and self._responses:
            oldest = next(iter(self._responses.values()))
            self._timer = asyncio.get_running_loop().call_later(max(0.0, oldest.end - self._now()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.drop_expired()
        self.expire_in_time()

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(self._responses[next(iter(self._of_key[tenant]))])

    def _use(self, items: StoredItems, tenant: str) -> None:
        """Counts a user of `items`. Items before them may have lost theirs while this response was generated."""
        used: StoredItems | None = items
        while used is not None:
            used.num_users += 1
            if used.num_users > 1:
                break
            self.held.take(tenant, used.num_bytes)
            self._items |= {(tenant, item_id): used for item_id in used.ids}
            used = used.previous

    def _release(self, items: StoredItems, tenant: str) -> None:
        """Takes back a user of `items`; those that have none left are forgotten, with what only they continue."""
        released: StoredItems | None = items
        while released is not None:
            released.num_users -= 1
            if released.num_users:
                break
            self.held.take(tenant, -released.num_bytes)
            for item_id in released.ids:
                if self._items.get((tenant, item_id)) is released:  # a client may use an id twice
                    del self._items[tenant, item_id]
            released = released.previous
