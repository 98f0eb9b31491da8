"""Batches of steps that run without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence


def step_batch(texts: Many[list[int]], new: int, first_logits: int, adapters: Many[str] = ()) -> Batch:
    """A step whose rows compute the last `new` tokens of texts of one length.

    The logits are those of the positions from `first_logits` on. `adapters`: the digest of each row's adapter.
    """
    batch, length = Batch(1 << 20), len(texts[0])
    for row, text in enumerate(texts):
        namespace = CacheNamespace(adapter=adapters[row]) if adapters else CacheNamespace()
        sequence = Sequence(namespace, text)
        sequence.pages.extend(np.arange(row * length, (row + 1) * length, dtype=np.int32))
        batch.add(Request(None, sequence, 0, first_logits), length - new, new)
    return batch


def random_texts(rows: int, length: int) -> list[list[int]]:
    """Tokens that are not control tokens, the same ones at every call."""
    return [np.random.default_rng(row).integers(0, 1000, length).tolist() for row in range(rows)]
