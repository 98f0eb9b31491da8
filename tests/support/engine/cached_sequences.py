"""Sequences for tests of the prefix cache."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence

NAMESPACE = CacheNamespace()
texts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def ints(values):
    return np.array(values, dtype=np.int32)


def publish(cache, tokens, namespace=NAMESPACE):
    """An idle sequence whose tokens are all computed and published."""
    seq = Sequence(namespace, tokens)
    cache.activate(seq, len(tokens))
    cache.extend_from_cache(seq, len(tokens))
    assert cache.allocate(seq, len(tokens) - seq.num_computed)
    cache.release(seq)
    return seq
