"""A node of the radix tree, and the position in the tree at which a match ends."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from plait.runtime.arrays import IntArray

MAX_EVICTED = 32  # evicted children that a node remembers
EMPTY: IntArray = np.empty(0, dtype=np.int32)


class CacheNamespace(NamedTuple):
    """Texts share cached KV only within one: of a tenant, a cache salt, and an adapter's id ("": none)."""

    tenant: str = ""
    salt: str = ""
    adapter: str = ""


class PinHolder(Protocol):
    """Holds a pin on a node: it counts on the cached tokens without locking them."""

    def on_evicted(self, num_tokens: int, parent: RadixNode) -> None:
        """Called when the pinned node is evicted: its `num_tokens` tokens are lost and the pin moves to `parent`."""


class TreeListener(Protocol):
    """Is called after every change of what a tree holds."""

    def on_insert(self, node: RadixNode) -> None:
        """`node` was added as a leaf."""

    def on_split(self, upper: RadixNode, lower: RadixNode) -> None:
        """`upper` was inserted above `lower` and took its first tokens."""

    def on_remove(self, node: RadixNode) -> None:
        """The leaf `node` was removed."""


class RadixNode:
    """One edge of the tree: `key[i]` is a token, `pages[i]` is the page that holds its KV.

    `lock_count` includes the locks of descendants. `end` is the number of tokens from the root to the end of this
    node; a split does not change it. `last_used` is the tree's clock at the last unlock. `block_hashes`: see
    `block_events.py`; empty unless the tree has a listener. `evicted`: first tokens of at most MAX_EVICTED children
    that were evicted; only for `CacheMiss`.
    """

    __slots__ = (
        "block_hashes",
        "children",
        "end",
        "evicted",
        "key",
        "last_used",
        "lock_count",
        "namespace",
        "pages",
        "parent",
        "pins",
    )

    def __init__(self, key: IntArray, pages: IntArray, parent: RadixNode | None, namespace: CacheNamespace) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.namespace = namespace
        self.end: int = len(key) + (parent.end if parent is not None else 0)
        self.children: dict[int, RadixNode] = {}
        self.lock_count = 0
        self.last_used = 0
        self.pins: set[PinHolder] = set()
        self.block_hashes: tuple[int, ...] = ()
        self.evicted: frozenset[int] = frozenset()

    @property
    def is_evictable(self) -> bool:
        """Whether the node is an unlocked leaf."""
        return not self.children and self.lock_count == 0 and self.parent is not None


class Match(NamedTuple):
    """The longest cached prefix, `length` tokens. It ends inside `node`, after `num_in_node` of the node's tokens.

    Valid until the tree changes.
    """

    node: RadixNode
    num_in_node: int
    length: int

    @property
    def pages(self) -> IntArray:
        """[length] int32, the pages of the matched tokens, concatenated on each access."""
        if not self.length:
            return EMPTY
        node, parts = self.node, [self.node.pages[: self.num_in_node]]
        num_left = self.length - self.num_in_node
        while num_left:
            assert node.parent is not None
            node = node.parent
            parts.append(node.pages)
            num_left -= len(node.pages)
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])
