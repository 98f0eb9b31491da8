"""Block events: which prefixes enter and leave a radix tree, as hashes in numbered batches, for a router of replicas.

A block is BLOCK_TOKENS tokens at a multiple of BLOCK_TOKENS. Its hash covers the namespace (tenant, cache salt and
adapter) and all tokens up to its end, so equal hashes mean equal prefixes, and tenants never share one. A block is in
the tree while the node with its last token is; that node holds the hash.

64 tokens for a block: computing up to 63 tokens more than a perfect match takes 2 ms on an H100 with an 8B model, while
blocks of 16 would cost four times the hashes, messages and memory of the router.
"""

from __future__ import annotations

import time
from hashlib import blake2b

import numpy as np

from plait.runtime.arrays import IntArray
from plait.runtime.kv_cache.radix_node import EMPTY, CacheNamespace, RadixNode
from plait.runtime.kv_cache.radix_tree import RadixTree
from plait.runtime.messages import BlockBatch, BlockSnapshot

BLOCK_TOKENS = 64
HASH_BYTES = 8  # two of a million blocks collide once in 40 million tables, and then only a placement is worse
HEARTBEAT_S = 0.25  # a batch is sent so often, empty or not
MAX_PENDING = 65_536  # changes between two batches; beyond it they are dropped and the receiver needs a snapshot


def namespace_hash(namespace: CacheNamespace) -> int:
    """The hash before the first block of a namespace."""
    tenant, salt = (part.encode("utf-8", "surrogatepass") for part in (namespace.tenant, namespace.salt))
    adapter = bytes.fromhex(namespace.adapter)
    digest = blake2b(len(tenant).to_bytes(8, "little") + tenant + salt, digest_size=HASH_BYTES, key=adapter).digest()
    return int.from_bytes(digest, "little")


def block_hashes(tokens: IntArray, parent: int) -> tuple[int, ...]:
    """The hashes of all full blocks of `tokens`, which begin behind the block with the hash `parent`."""
    data, size = np.ascontiguousarray(tokens, dtype="<i4").tobytes(), 4 * BLOCK_TOKENS
    digest, hashes = parent.to_bytes(HASH_BYTES, "little"), []
    for start in range(0, len(data) - size + 1, size):
        digest = blake2b(digest + data[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return tuple(hashes)


class BlockEvents:
    """Follows one radix tree. The cost of a change is in proportion to its blocks, never to the tree."""

    def __init__(self, tree: RadixTree, epoch: int | None = None, max_pending: int = MAX_PENDING) -> None:
        self.tree, self.max_pending = tree, max_pending
        self.epoch = time.time_ns() if epoch is None else epoch
        self._sequence = 0
        self._added: set[int] = set()
        self._removed: set[int] = set()
        for node in tree.nodes():  # parents before children
            node.block_hashes = ()  # those of an earlier listener
            self.on_insert(node)
        tree.listener = self

    # -- called by the tree -------------------------------------------------------------------------

    def on_insert(self, node: RadixNode) -> None:
        """Called when a node was added. Hashes the blocks that end in it."""
        start = node.end - len(node.key)
        num_open = start % BLOCK_TOKENS  # tokens of the first block that lie above the node
        if node.parent is None or num_open + len(node.key) < BLOCK_TOKENS:
            return
        tokens = np.concatenate([_last_tokens(node.parent, num_open), node.key]) if num_open else node.key
        node.block_hashes = block_hashes(tokens, _last_hash(node.parent))
        for block in node.block_hashes:
            if block in self._removed:
                self._removed.remove(block)
            else:
                self._added.add(block)
        self._bound()

    def on_split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Called when `upper` was inserted above `lower` and took its first tokens. No block enters or leaves."""
        if lower.block_hashes:
            count = upper.end // BLOCK_TOKENS - (upper.end - len(upper.key)) // BLOCK_TOKENS
            upper.block_hashes, lower.block_hashes = lower.block_hashes[:count], lower.block_hashes[count:]

    def on_remove(self, node: RadixNode) -> None:
        """Called when a leaf was removed."""
        for block in node.block_hashes:
            if block in self._added:
                self._added.remove(block)
            else:
                self._removed.add(block)
        self._bound()

    def _bound(self) -> None:
        if len(self._added) + len(self._removed) > self.max_pending:
            self._added.clear()
            self._removed.clear()
            self._sequence += 1  # a number that is never sent: the receiver finds the gap

    # -- called by the sender -----------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Changes that no batch has yet."""
        return len(self._added) + len(self._removed)

    def take_batch(self) -> BlockBatch:
        """Returns the changes since the last batch or snapshot; empty if there are none (a heartbeat)."""
        self._sequence += 1
        batch = BlockBatch(self.epoch, self._sequence, list(self._added), list(self._removed))
        self._added.clear()
        self._removed.clear()
        return batch

    def snapshot(self) -> BlockSnapshot:
        """Returns all blocks in the tree, in place of the batch that was taken last. Nothing may have changed since."""
        blocks = [block for node in self.tree.nodes() for block in node.block_hashes]
        return BlockSnapshot(self.epoch, self._sequence, blocks)


def _last_hash(node: RadixNode) -> int:
    """The hash of the last block that ends at or before the end of `node`."""
    while not node.block_hashes:
        if node.parent is None:
            return namespace_hash(node.namespace)
        node = node.parent
    return node.block_hashes[-1]


def _last_tokens(node: RadixNode, count: int) -> IntArray:
    """The last `count` tokens of the path from the root to the end of `node`."""
    parts: list[IntArray] = []
    above: RadixNode | None = node
    while count and above is not None:
        part = above.key[-count:]
        parts.append(part)
        count -= len(part)
        above = above.parent
    return np.concatenate(parts[::-1]) if parts else EMPTY
