"""The prefix cache in use: hands pages to sequences, finds what is cached, publishes what was computed.

Keeps one promise: free + cached + held == total, where held pages are locked in the tree, private to a
sequence, or lent for a token that is not known yet. Knows: pool, tree, sequences. Must not know: calls, batches, or
fairness.
"""

from __future__ import annotations

import numpy as np

from plait.runtime.kv_cache.page_pool import PagePool
from plait.runtime.kv_cache.radix_tree import RadixNode, RadixTree
from plait.runtime.kv_cache.sequence import Sequence


class PrefixCache:
    """Pages for sequences, through one pool and one radix tree."""

    def __init__(self, total_pages: int) -> None:
        self.pool = PagePool(total_pages)
        self.tree = RadixTree()
        self.num_private = 0
        self.reserved_pages: set[int] = set()

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones and cached ones that nothing runs on."""
        return self.pool.num_free + self.tree.num_cached

    # -- a sequence's life ------------------------------------------------------------------------

    def activate(self, seq: Sequence, limit: int) -> None:
        """Locks what the sequence still has in the tree, so that it can run; at most `limit` tokens of it,

        because the model has to see those after it (again) to give their logits.
        """
        if seq.is_locked:
            return
        if seq.node is None:
            seq.node = self.tree.root(seq.namespace)
        seq.node.pins.discard(seq)
        if seq.num_computed > limit:
            seq.node = self.tree.ancestor(seq.node, seq.num_computed - limit)
            seq.pages.truncate(limit)
            seq.num_in_tree = limit
        self.tree.lock_node(seq.node)
        seq.is_locked = True

    def extend_from_cache(self, seq: Sequence, limit: int) -> None:
        """Takes over cached pages for tokens [num_computed, limit), as far as the tree has them."""
        if seq.num_computed >= limit or not self._merge_private_pages(seq):
            return
        old = seq.node
        assert seq.is_locked and old is not None
        match = self.tree.match(old, seq.tokens.view()[seq.num_computed : limit])
        if match.length:
            seq.pages.extend(match.pages)  # before a split makes the match void
            seq.node = self.tree.split_at_match(match)
            self.tree.move_lock(old, seq.node)
            seq.num_in_tree = seq.num_computed

    def _merge_private_pages(self, seq: Sequence) -> bool:
        """Whether all that the sequence computed is in the tree; its own pages give way to another's of the same."""
        at, end = seq.num_in_tree, seq.num_computed
        if at < end:
            assert seq.node is not None
            if self.tree.match(seq.node, seq.tokens.view()[at:end]).length < end - at:
                return False
            self.publish(seq)
        return True

    def match_length(self, seq: Sequence, limit: int) -> int:
        """How many tokens would be there after `extend_from_cache`. Changes nothing."""
        start = seq.node if seq.node is not None else self.tree.find_root(seq.namespace)
        if start is None or seq.num_in_tree < seq.num_computed:
            return seq.num_computed
        return seq.num_computed + self.tree.match(start, seq.tokens.view()[seq.num_computed : limit]).length

    def num_locked_match(self, seq: Sequence, limit: int) -> int:
        """How many of the tokens that `match_length` counts lie in pages that running sequences hold already."""
        start = seq.node if seq.node is not None else self.tree.find_root(seq.namespace)
        if start is None:
            return 0
        match = self.tree.match(start, seq.tokens.view()[seq.num_computed : limit])
        node: RadixNode | None = match.node
        shared, in_node = 0, match.num_in_node
        while node is not None:
            shared += in_node if node.lock_count else 0
            node = node.parent
            in_node = len(node.key) if node is not None else 0
        return shared

    def allocate(self, seq: Sequence, count: int) -> bool:
        """`count` more private pages for the sequence, evicting cache if need be; False when there are not as many."""
        if count > self.pool.num_free and not self._evict_for(count):
            return False
        if count == 1:
            seq.pages.append(self.pool.allocate_one())
        else:
            seq.pages.extend(self.pool.allocate(count))
        self.num_private += count
        return True

    def _evict_for(self, count: int) -> bool:
        missing = count - self.pool.num_free
        if missing > self.tree.num_cached:
            return False
        if missing > 0:
            spare = min(self.tree.num_cached, missing + self.pool.total // 64)
            self.pool.release(self.tree.evict(spare))
        return True

    # -- pages for tokens that are not known yet ----------------------------------------------------

    def reserve_page(self) -> int | None:
        """A page for a token that a sequence may get; None when there is none. `commit_reserved` or `release_reserved` follows."""
        if not self._evict_for(1):
            return None
        page = self.pool.allocate_one()
        self.reserved_pages.add(page)
        return page

    def commit_reserved(self, seq: Sequence, page: int) -> None:
        """The lent page's token has come: it is the sequence's first one without a page."""
        assert seq.is_locked and seq.num_computed < len(seq)
        self.reserved_pages.remove(page)
        seq.pages.append(page)
        self.num_private += 1

    def release_reserved(self, page: int) -> None:
        """The lent page's token did not come, and nothing writes the page any more."""
        self.reserved_pages.remove(page)
        self.pool.release(np.array([page], dtype=np.int32))

    # -- between sequences and the tree ---------------------------------------------------------------

    def publish_early(self, seq: Sequence) -> RadixNode | None:
        """Publishes pages that this step will fill, so that rows of the same step can share them.

        Every layer writes all KV before it reads any, so a row may read what its neighbour writes in one forward.
        Only where the tree has nothing yet; returns the new node, to be removed should the forward fail.
        """
        assert seq.node is not None
        if seq.num_in_tree == seq.num_computed or seq.tokens.at(seq.num_in_tree) in seq.node.children:
            return None
        self.publish(seq)
        return seq.node

    def publish(self, seq: Sequence) -> None:
        """Moves the sequence's private pages into the tree; those the tree had already are freed."""
        if seq.num_in_tree == seq.num_computed:
            return
        assert seq.is_locked and seq.node is not None
        at, end = seq.num_in_tree, seq.num_computed
        mine = seq.pages.view()[at:end]
        node, kept = self.tree.insert(seq.node, seq.tokens.view()[at:end], mine)
        self.tree.move_lock(seq.node, node)
        self.num_private -= end - at
        if kept is not mine:
            self.pool.release(mine[kept != mine])
            seq.pages.replace(at, kept)
        seq.node, seq.num_in_tree = node, end

    def release(self, seq: Sequence) -> None:
        """The sequence stops running: what it computed becomes cache, and it keeps a pin on it."""
        if not seq.is_locked:
            return
        self.publish(seq)
        assert seq.node is not None
        seq.node.pins.add(seq)
        self._unlock(seq)

    def free(self, seq: Sequence) -> None:
        """The sequence ends: what it computed stays as cache, without a pin."""
        self.release(seq)
        node = seq.node
        if node is not None:
            node.pins.discard(seq)
            seq.node = None
            self.tree.drop_if_empty(node)
        seq.pages.truncate(0)
        seq.num_in_tree = 0

    def reset(self, seq: Sequence) -> None:
        """The sequence lets go of everything at once, publishing nothing (its last pages were never written)."""
        self.truncate(seq, seq.num_in_tree)
        if seq.is_locked:
            self._unlock(seq)
        if seq.node is not None:
            seq.node.pins.discard(seq)
        seq.node, seq.num_in_tree = None, 0
        seq.pages.truncate(0)

    def rollback_insert(self, node: RadixNode, num_tokens: int) -> None:
        """Takes the `num_tokens` that end with an unlocked node, and all below them, out of the tree.

        Their KV was never written. They were one node when they were published; another row of the same step may
        have split it since.
        """
        if node.parent is None:
            return  # gone already, with one above it
        while num_tokens > len(node.key) and node.parent is not None:
            num_tokens -= len(node.key)
            node = node.parent
        self.pool.release(self.tree.remove_subtree(node))

    def truncate(self, seq: Sequence, num_computed: int) -> None:
        """Forgets the pages from `num_computed` on (tokens cut off by a stop string, say).

        Private ones are freed. Those that a retraction has put into the tree stay there as cache.
        """
        if num_computed == seq.num_computed:
            return
        tail = seq.pages.view()[max(num_computed, seq.num_in_tree) :]
        self.pool.release(tail)
        self.num_private -= len(tail)
        seq.pages.truncate(num_computed)
        if num_computed < seq.num_in_tree:
            assert seq.is_locked and seq.node is not None
            node = self.tree.ancestor(seq.node, seq.num_in_tree - num_computed)
            self.tree.move_lock(seq.node, node)
            seq.node, seq.num_in_tree = node, num_computed

    def fork(self, seq: Sequence) -> Sequence:
        """A sequence with the same tokens that shares every page computed so far. `seq` is active or idle."""
        if seq.is_locked:
            self.publish(seq)
        child = Sequence(seq.namespace, seq.tokens.view())
        if seq.node is not None:
            child.node, child.num_in_tree = seq.node, seq.num_in_tree
            child.pages.extend(seq.pages.view())
            seq.node.pins.add(child)
        return child

    def truncate_idle(self, seq: Sequence, num_tokens: int) -> None:
        """An idle sequence's text is now its first `num_tokens` tokens, at least one; the rest's KV stays as cache."""
        assert not seq.is_locked and num_tokens
        if seq.num_computed > num_tokens:
            assert seq.node is not None
            seq.node.pins.discard(seq)
            seq.node = self.tree.ancestor(seq.node, seq.num_computed - num_tokens)
            seq.node.pins.add(seq)
            seq.pages.truncate(num_tokens)
            seq.num_in_tree = num_tokens
        seq.tokens.truncate(num_tokens)

    def _unlock(self, seq: Sequence) -> None:
        assert seq.node is not None
        seq.is_locked = False
        self.tree.unlock_node(seq.node)

    # -- all of it --------------------------------------------------------------------------------

    def flush(self) -> None:
        """Drops all cache that nothing runs on."""
        self.pool.release(self.tree.evict(self.tree.num_cached))

    def counts(self) -> tuple[int, int, int]:
        """(free, cached, held) pages."""
        return (
            self.pool.num_free,
            self.tree.num_cached,
            self.tree.num_locked + self.num_private + len(self.reserved_pages),
        )

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError unless every page is in exactly one place; `sequences` are all that live."""
        self.tree.check_integrity()
        in_tree = [page for node in self.tree.nodes() for page in node.pages.tolist()]
        private = [page for seq in sequences for page in seq.pages.view()[seq.num_in_tree :].tolist()]
        free = self.pool.free_pages().tolist()
        everywhere = sorted(in_tree + private + free + list(self.reserved_pages))
        assert everywhere == list(range(self.pool.total)), "a page is lost or in two places"
        assert len(private) == self.num_private
        assert sum(self.counts()) == self.pool.total
        for seq in sequences:
            assert (seq.num_in_tree == seq.num_computed) or seq.is_locked
            self._check_path(seq)

    def _check_path(self, seq: Sequence) -> None:
        path, node = [], seq.node
        while node is not None:
            path.append(node)
            node = node.parent
        tokens = [t for n in reversed(path) for t in n.key.tolist()]
        pages = [p for n in reversed(path) for p in n.pages.tolist()]
        assert tokens == seq.tokens.view()[: seq.num_in_tree].tolist(), "the path in the tree spells another text"
        assert pages == seq.pages.view()[: seq.num_in_tree].tolist()
        if seq.node is not None:
            assert seq.is_locked or seq in seq.node.pins
