"""The prefix cache: gives pages to sequences, finds cached prefixes, and publishes computed tokens in the radix tree.

Invariant: free + cached + used == total. Used pages are locked in the tree, private to a sequence, or reserved for a
token that is not sampled yet.
"""

from __future__ import annotations

import numpy as np

from plait.runtime.call_reports import MissReason
from plait.runtime.kv_cache.page_pool import PagePool
from plait.runtime.kv_cache.planned_release import PlannedRelease
from plait.runtime.kv_cache.radix_node import EMPTY, RadixNode
from plait.runtime.kv_cache.radix_tree import RadixTree
from plait.runtime.kv_cache.sequence import Sequence


class PrefixCache:
    """Manages the pages of all sequences with one page pool and one radix tree."""

    def __init__(self, total_pages: int) -> None:
        self.pool = PagePool(total_pages)
        self.tree = RadixTree()
        self.num_private = 0
        self.reserved_pages: set[int] = set()

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free pages, and cached pages that no running sequence uses."""
        return self.pool.num_free + self.tree.num_cached

    # -- running sequences ------------------------------------------------------------------------

    def activate(self, seq: Sequence, limit: int) -> None:
        """Locks the sequence's node in the tree so that the sequence can run.

        Keeps at most `limit` computed tokens, because the model must process the later ones (again) for their logits.
        """
        if seq.is_locked:
            return
        if seq.node is None:
            seq.node = self.tree.root(seq.namespace)
        self.tree.unpin(seq.node, seq)
        if seq.num_computed > limit:
            seq.node = self.tree.ancestor(seq.node, seq.num_computed - limit)
            seq.pages.truncate(limit)
            seq.num_in_tree = limit
        self.tree.lock_node(seq.node)
        seq.is_locked = True

    def extend_from_cache(self, seq: Sequence, limit: int) -> None:
        """Adds the cached pages of tokens [num_computed, limit), as far as the tree has them."""
        if seq.num_computed >= limit or not self._merge_private_pages(seq):
            return
        old = seq.node
        assert seq.is_locked and old is not None
        match = self.tree.match(old, seq.tokens.view()[seq.num_computed : limit])
        if match.length:
            seq.pages.extend(match.pages)  # first: a split invalidates the match
            seq.node = self.tree.split_at_match(match)
            self.tree.move_lock(old, seq.node)
            seq.num_in_tree = seq.num_computed

    def _merge_private_pages(self, seq: Sequence) -> bool:
        """Whether all computed tokens are in the tree.

        If the tree holds the same tokens already, frees the sequence's private pages and uses those of the tree.
        """
        start, end = seq.num_in_tree, seq.num_computed
        if start < end:
            assert seq.node is not None
            if self.tree.match(seq.node, seq.tokens.view()[start:end]).length < end - start:
                return False
            self.publish(seq)
        return True

    def match_length(self, seq: Sequence, limit: int) -> int:
        """Returns what `num_computed` would be after `activate` and `extend_from_cache`. Changes nothing."""
        start = seq.node if seq.node is not None else self.tree.find_root(seq.namespace)
        if start is None or seq.num_in_tree < seq.num_computed:
            return seq.num_computed
        return seq.num_computed + self.tree.match(start, seq.tokens.view()[seq.num_computed : limit]).length

    def miss_reason(self, seq: Sequence, limit: int) -> MissReason:
        """Returns why tokens [num_computed, limit) are not cached, right after `extend_from_cache` at a call's first
        step. Only the sequence's own root counts. Changes nothing."""
        if seq.num_computed >= limit:
            return "outputs"
        assert seq.node is not None
        if seq.tokens.at(seq.num_computed) in seq.node.evicted:
            return "evicted"
        if not seq.num_computed:
            return "new_prefix"
        return "diverged" if seq.node.children else "extended"

    def num_locked_match(self, seq: Sequence, limit: int, released: PlannedRelease | None = None) -> int:
        """Returns how many of the tokens counted by `match_length` lie in pages that running sequences lock already.

        released: sequences whose locks do not count.
        """
        released = released or PlannedRelease()
        start = seq.node if seq.node is not None else self.tree.find_root(seq.namespace)
        if start is None:
            return 0
        match = self.tree.match(start, seq.tokens.view()[seq.num_computed : limit])
        node: RadixNode | None = match.node
        num_shared, num_in_node = 0, match.num_in_node
        while node is not None:
            num_shared += num_in_node if released.leaves_locked(node) else 0
            node = node.parent
            num_in_node = len(node.key) if node is not None else 0
        return num_shared

    def allocate(self, seq: Sequence, count: int) -> bool:
        """Adds `count` private pages to the sequence, evicting cache if needed. Returns False if that is not enough."""
        if count > self.pool.num_free and not self._evict_for(count):
            return False
        if count == 1:
            seq.pages.append(self.pool.allocate_one())
        else:
            seq.pages.extend(self.pool.allocate(count))
        self.num_private += count
        return True

    def _evict_for(self, count: int) -> bool:
        """Evicts until `count` pages are free, and 1/64 of the pool more so that not every step evicts."""
        missing = count - self.pool.num_free
        if missing > self.tree.num_cached:
            return False
        if missing > 0:
            num_evicted = min(self.tree.num_cached, missing + self.pool.total // 64)
            self.pool.release(self.tree.evict(num_evicted))
        return True

    # -- pages reserved for tokens that are not sampled yet ---------------------------------------

    def reserve_page(self) -> int | None:
        """Reserves a page for a token that a sequence may get; returns None if no page is left.

        The caller must call `commit_reserved` or `release_reserved` later.
        """
        if not self._evict_for(1):
            return None
        page = self.pool.allocate_one()
        self.reserved_pages.add(page)
        return page

    def commit_reserved(self, seq: Sequence, page: int) -> None:
        """Gives a reserved page to the sequence's first token without a page."""
        assert seq.is_locked and seq.num_computed < len(seq)
        self.reserved_pages.remove(page)
        seq.pages.append(page)
        self.num_private += 1

    def release_reserved(self, page: int) -> None:
        """Frees a reserved page that is not needed. The device must no longer write to it."""
        self.reserved_pages.remove(page)
        self.pool.release(np.array([page], dtype=np.int32))

    # -- publishing in the tree -------------------------------------------------------------------

    def publish_early(self, seq: Sequence) -> RadixNode | None:
        """Publishes pages that the current step will fill, so that other requests of the same step can share them.

        This works because every layer writes all KV of a step before it reads any. Publishes only if the tree has no
        continuation yet. Returns the new node, which `rollback_insert` must remove if the forward pass fails, or None.
        """
        assert seq.node is not None
        if seq.num_in_tree == seq.num_computed or seq.tokens.at(seq.num_in_tree) in seq.node.children:
            return None
        self.publish(seq)
        return seq.node

    def publish(self, seq: Sequence) -> None:
        """Moves the sequence's private pages into the tree; frees those for which the tree has a page already."""
        if seq.num_in_tree == seq.num_computed:
            return
        assert seq.is_locked and seq.node is not None
        start, end = seq.num_in_tree, seq.num_computed
        private = seq.pages.view()[start:end]
        node, kept = self.tree.insert(seq.node, seq.tokens.view()[start:end], private)
        self.tree.move_lock(seq.node, node)
        self.num_private -= end - start
        if kept is not private:
            self.pool.release(private[kept != private])
            seq.pages.replace(start, kept)
        seq.node, seq.num_in_tree = node, end

    def release(self, seq: Sequence) -> None:
        """Stops a running sequence: its computed tokens become cache, and the sequence keeps a pin on them."""
        if not seq.is_locked:
            return
        self.publish(seq)
        assert seq.node is not None
        self.tree.pin(seq.node, seq)
        self._unlock(seq)

    def free(self, seq: Sequence) -> None:
        """Ends a sequence: its computed tokens stay as cache, without a pin."""
        self.release(seq)
        node = seq.node
        if node is not None:
            self.tree.unpin(node, seq)
            seq.node = None
            self.tree.drop_if_empty(node)
        seq.pages.truncate(0)
        seq.num_in_tree = 0

    def discard(self, seq: Sequence, num_written: int, unwritten: list[RadixNode]) -> None:
        """Drops the pages of a step that failed: those from `num_written` on, or all pages of the sequence if its path
        contains one of `unwritten`."""
        node = seq.node
        while node is not None and node not in unwritten:
            node = node.parent
        if node is None:
            self.truncate(seq, min(num_written, seq.num_computed))
        else:
            self._reset(seq)

    def _reset(self, seq: Sequence) -> None:
        """Frees all of the sequence's pages without publishing any."""
        self.truncate(seq, seq.num_in_tree)
        if seq.is_locked:
            self._unlock(seq)
        if seq.node is not None:
            self.tree.unpin(seq.node, seq)
        seq.node, seq.num_in_tree = None, 0
        seq.pages.truncate(0)

    def first_node_of_insert(self, node: RadixNode, num_tokens: int) -> RadixNode:
        """Returns the node that begins the `num_tokens` tokens that end with `node`.

        They were one node when they were published, but another request of the same step may have split it since.
        """
        while num_tokens > len(node.key) and node.parent is not None:
            num_tokens -= len(node.key)
            node = node.parent
        return node

    def rollback_insert(self, first: RadixNode) -> None:
        """Removes from the tree an unlocked node whose KV was never written, and everything below it."""
        if first.parent is not None:  # else it was removed together with an ancestor
            self.pool.release(self.tree.remove_subtree(first))

    def truncate(self, seq: Sequence, num_computed: int) -> None:
        """Drops the sequence's pages from `num_computed` on, for example those of tokens cut off by a stop string.

        Private pages are freed. Pages that a retraction has published stay in the tree as cache.
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
        """Returns a new idle sequence with the same tokens and pages. `seq` may be running or idle."""
        if seq.is_locked:
            self.publish(seq)
        child = Sequence(seq.namespace, seq.tokens.view())
        if seq.node is not None:
            child.node, child.num_in_tree = seq.node, seq.num_in_tree
            child.pages.extend(seq.pages.view())
            self.tree.pin(seq.node, child)
        return child

    def truncate_idle(self, seq: Sequence, num_tokens: int) -> None:
        """Cuts an idle sequence to its first `num_tokens` >= 1 tokens. The KV of the rest stays as cache."""
        assert not seq.is_locked and num_tokens
        if seq.num_computed > num_tokens:
            assert seq.node is not None
            self.tree.unpin(seq.node, seq)
            seq.node = self.tree.ancestor(seq.node, seq.num_computed - num_tokens)
            self.tree.pin(seq.node, seq)
            seq.pages.truncate(num_tokens)
            seq.num_in_tree = num_tokens
        seq.tokens.truncate(num_tokens)

    def _unlock(self, seq: Sequence) -> None:
        assert seq.node is not None
        seq.is_locked = False
        self.tree.unlock_node(seq.node)

    # -- the whole cache --------------------------------------------------------------------------

    def flush(self, tenant: str | None = None) -> None:
        """Evicts all cache of `tenant`, or of all tenants, that no running sequence uses."""
        if tenant is None:
            self.pool.release(self.tree.evict(self.tree.num_cached))
        else:
            self.pool.release(self.tree.evict_tenant(tenant))

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of (free, cached, used) pages."""
        return (
            self.pool.num_free,
            self.tree.num_cached,
            self.tree.num_locked + self.num_private + len(self.reserved_pages),
        )

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError unless every page is in exactly one place. `sequences`: all sequences that exist."""
        self.tree.check_integrity()
        private = [seq.pages.view()[seq.num_in_tree :] for seq in sequences]
        reserved = np.fromiter(self.reserved_pages, np.int32)
        in_tree = [node.pages for node in self.tree.nodes()]
        all_pages = np.sort(np.concatenate([*in_tree, *private, reserved, self.pool.free_pages()]))
        assert np.array_equal(all_pages, np.arange(self.pool.total)), "a page is lost or in two places"
        assert sum(map(len, private)) == self.num_private
        assert sum(self.counts()) == self.pool.total
        for seq in sequences:
            assert (seq.num_in_tree == seq.num_computed) or seq.is_locked
            self._check_path(seq)

    def _check_path(self, seq: Sequence) -> None:
        keys, pages, node = [EMPTY], [EMPTY], seq.node
        while node is not None:
            keys.append(node.key)
            pages.append(node.pages)
            node = node.parent
        tokens_match = np.array_equal(np.concatenate(keys[::-1]), seq.tokens.view()[: seq.num_in_tree])
        assert tokens_match, "the path in the tree holds other tokens"
        assert np.array_equal(np.concatenate(pages[::-1]), seq.pages.view()[: seq.num_in_tree])
        if seq.node is not None:
            assert seq.is_locked or seq in seq.node.pins
