"""Block events of a prefix cache, compared with hashes of every path that the tree holds."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.kv_cache.block_events import BLOCK_TOKENS, BlockEvents, block_hashes, namespace_hash
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence

NAMESPACES = [CacheNamespace(*parts) for parts in ((), ("a",), ("a", "b"), ("ab",), ("a", "b", "c0ffee"))]
HALF = BLOCK_TOKENS // 2
# Texts of runs of equal tokens, so that they share prefixes and part inside blocks.
TEXTS = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from([1, HALF - 1, HALF, BLOCK_TOKENS])), min_size=1, max_size=6
)
OPERATIONS = st.one_of(
    st.tuples(st.just("run"), st.sampled_from(NAMESPACES), TEXTS, st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 20)),
    st.tuples(st.just("fork"), st.integers(0, 20)),
    st.tuples(st.just("truncate"), st.integers(0, 20), st.integers(1, 200)),
    st.tuples(st.just("flush"), st.sampled_from([None, "", "a"])),
    st.tuples(st.just("evict"), st.integers(1, 500)),
    st.tuples(st.just("batch")),
    st.tuples(st.just("snapshot")),
)


def blocks_of(cache: PrefixCache) -> set[int]:
    """The hashes of all blocks in the tree, each computed from the root on."""
    found = set()
    for leaf in cache.tree.nodes():
        path, node = [], leaf
        while node is not None:
            path.append(node.key)
            node = node.parent
        tokens = np.concatenate(path[::-1])
        namespace = leaf.namespace
        tenant, key = namespace.tenant.encode(), bytes.fromhex(namespace.adapter)
        start = blake2b(
            len(tenant).to_bytes(8, "little") + tenant + namespace.salt.encode(), digest_size=8, key=key
        ).digest()
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            digest = start
            for block in range(0, end, BLOCK_TOKENS):
                digest = blake2b(digest + tokens[block : block + BLOCK_TOKENS].tobytes(), digest_size=8).digest()
            found.add(int.from_bytes(digest, "little"))
    return found


class Receiver:
    """What the sent events add up to."""

    def __init__(self, events: BlockEvents) -> None:
        self.events, self.blocks, self.sequence = events, set(), 0

    def receive_batch(self) -> None:
        batch = self.events.take_batch()
        if batch.sequence != self.sequence + 1:
            return self.receive_snapshot()
        assert not self.blocks & set(batch.added)
        assert self.blocks >= set(batch.removed)
        self.blocks = self.blocks - set(batch.removed) | set(batch.added)
        self.sequence = batch.sequence

    def receive_snapshot(self) -> None:
        self.events.take_batch()
        snapshot = self.events.snapshot()
        assert len(snapshot.blocks) == len(set(snapshot.blocks))
        self.blocks, self.sequence = set(snapshot.blocks), snapshot.sequence


def run(cache: PrefixCache, namespace: CacheNamespace, text: list[tuple[int, int]], publish: bool) -> Sequence | None:
    tokens = [token for token, count in text for _ in range(count)]
    seq = Sequence(namespace, tokens)
    cache.activate(seq, len(tokens))
    cache.extend_from_cache(seq, len(tokens))
    if not cache.allocate(seq, len(tokens) - seq.num_computed):
        cache.free(seq)
        return None
    if publish:
        cache.publish(seq)
    return seq


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, max_size=40), st.sampled_from([4, 10_000]))
def test_events_add_up_to_what_the_tree_holds(operations, max_pending) -> None:
    cache, sequences = PrefixCache(1500), []
    if operations and operations[0][0] == "run":  # what the tree holds before anyone follows it is told too
        cache.free(run(cache, *operations[0][1:]))
    events = BlockEvents(cache.tree, max_pending=max_pending)
    receiver = Receiver(events)
    for name, *arguments in operations:
        index = arguments[0] % len(sequences) if sequences and name in ("end", "fork", "truncate") else None
        if name == "run":
            if (seq := run(cache, *arguments)) is not None:
                sequences.append(seq)
        elif name == "end" and index is not None:
            cache.free(sequences.pop(index))
        elif name == "fork" and index is not None:
            sequences.append(cache.fork(sequences[index]))
        elif name == "truncate" and index is not None and sequences[index].is_locked:
            cache.truncate(sequences[index], min(arguments[1], sequences[index].num_computed))
        elif name == "flush":
            cache.flush(arguments[0])
        elif name == "evict":
            cache.pool.release(cache.tree.evict(arguments[0]))
        elif name == "batch":
            receiver.receive_batch()
            assert receiver.blocks == blocks_of(cache)
        elif name == "snapshot":
            receiver.receive_snapshot()
        assert events.num_pending <= max_pending
        cache.check_integrity(sequences)
    receiver.receive_batch()
    assert receiver.blocks == blocks_of(cache)


def test_a_block_stays_with_the_upper_part_of_a_split_inside_it() -> None:
    cache = PrefixCache(1000)
    events = BlockEvents(cache.tree)
    cache.free(run(cache, CacheNamespace(), [(1, HALF)], publish=True))  # half a block
    cache.free(run(cache, CacheNamespace(), [(1, BLOCK_TOKENS), (2, BLOCK_TOKENS)], publish=True))  # and another one
    held = run(cache, CacheNamespace(), [(1, BLOCK_TOKENS)], publish=True)  # splits where the first block ends
    cache.flush()
    assert set(events.take_batch().added) == blocks_of(cache) and len(blocks_of(cache)) == 1
    cache.free(held)


def test_a_failed_step_takes_its_blocks_back() -> None:
    cache = PrefixCache(1000)
    events = BlockEvents(cache.tree)
    seq = run(cache, CacheNamespace(), [(1, 200)], publish=False)
    node = cache.publish_early(seq)
    assert len(events.take_batch().added) == 3
    first = cache.first_node_of_insert(node, 200)
    cache.discard(seq, 0, [first])
    cache.rollback_insert(first)
    assert len(events.take_batch().removed) == 3


def test_the_router_hashes_a_prompt_as_the_replica_does() -> None:
    cache = PrefixCache(1000)
    events = BlockEvents(cache.tree)
    run(cache, CacheNamespace("a", "s"), [(1, 100), (2, 100)], publish=True)
    prompt = np.array([1] * 100 + [2] * 100, np.int32)
    assert set(events.take_batch().added) == set(block_hashes(prompt, namespace_hash(CacheNamespace("a", "s"))))


def test_tenants_share_no_hash() -> None:
    tokens = np.ones(BLOCK_TOKENS, np.int32)
    assert len({block_hashes(tokens, namespace_hash(namespace)) for namespace in NAMESPACES}) == len(NAMESPACES)


def test_a_restart_has_a_higher_epoch() -> None:
    first, second = (BlockEvents(PrefixCache(10).tree) for _ in range(2))
    assert first.take_batch().epoch < second.take_batch().epoch
