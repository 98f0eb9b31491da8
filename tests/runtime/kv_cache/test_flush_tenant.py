"""A flush of one tenant evicts its cached prefixes, whatever their cache salt, and nothing of other tenants."""

from __future__ import annotations

from cached_sequences import publish
from fake_engine import generate, make_engine_loop, post, run_until_idle
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.messages import Append, FlushCache, Open

TENANTS = st.sampled_from(["", "a", "b"])
TEXTS = st.lists(st.integers(1, 3), min_size=1, max_size=8)
ENTRIES = st.lists(st.tuples(TENANTS, st.sampled_from(["", "salt"]), TEXTS, st.booleans()), max_size=12)


@settings(max_examples=100, deadline=None)
@given(ENTRIES, TENANTS)
def test_only_unused_prefixes_of_the_tenant_are_evicted(entries, flushed) -> None:
    cache, running, used, cached = PrefixCache(200), [], {}, {}
    for tenant, salt, text, is_running in entries:
        seq = publish(cache, text, CacheNamespace(tenant, salt))
        prefixes = {(tenant, salt, *text[:length]) for length in range(1, len(text) + 1)}
        cached.setdefault(tenant, set()).update(prefixes)
        if is_running:
            cache.activate(seq, len(text))
            running.append(seq)
            used.setdefault(tenant, set()).update(prefixes)
        else:
            cache.free(seq)
    cache.flush(flushed)
    cache.check_integrity(running)
    for tenant, prefixes in cached.items():
        left = used.get(tenant, set()) if tenant == flushed else prefixes
        num_left = sum(len(node.key) for node in cache.tree.nodes() if node.namespace.tenant == tenant)
        assert num_left == len(left)
    for seq in running:
        cache.free(seq)
    cache.flush()
    assert cache.counts() == (200, 0, 0)


def test_the_message_names_the_tenant() -> None:
    engine_loop, transport, _ = make_engine_loop()
    for session, tenant in ((1, "a"), (2, "b")):
        run_until_idle(
            engine_loop, transport, Open(session, tenant), Append(session, [1] * 30), generate(session, session, 5)
        )
    cached = engine_loop.status(0).cached_pages
    post(transport, FlushCache(9, "a"))
    engine_loop.step(0.0)
    after_one = transport.outbox[-1][1].cached_pages
    assert 0 < after_one < cached
    post(transport, FlushCache(10, "c"))
    engine_loop.step(0.0)
    assert transport.outbox[-1][1].cached_pages == after_one
    post(transport, FlushCache(11))
    engine_loop.step(0.0)
    assert transport.outbox[-1][1].cached_pages == 0
