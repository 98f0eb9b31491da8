"""`batch_arrays`, compared with a loop over the rows of random batches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.executor.batch_arrays import batch_arrays
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence

counts = st.integers(0, 6)
rows_of = st.lists(st.tuples(counts, st.integers(1, 5), counts), min_size=1, max_size=6)
decoding = st.lists(st.tuples(counts, st.just(1), st.just(0)), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(rows_of | decoding)
def test_arrays_equal_those_of_a_loop_over_rows(rows):
    """A row is (computed tokens, new tokens, new tokens without_logits logits)."""
    batch, expected = Batch(10_000), [[] for _ in range(7)]
    ids, logit_indices, q_starts, kv_starts, kv_pages, positions, write_slots = expected
    q_starts.append(0)
    kv_starts.append(0)
    for number, (start, count, without_logits) in enumerate(rows):
        seq = Sequence(CacheNamespace(), [100 * number + i for i in range(start + count)])
        pages = [1000 * number + 7 * i for i in range(start + count)]
        seq.pages.extend(pages)
        batch.add(Request(None, seq, 0, start + without_logits), start, count)
        logit_indices += range(len(ids) + min(without_logits, count), len(ids) + count)
        ids += seq.tokens.view()[start:].tolist()
        kv_pages += pages
        write_slots += pages[start:]
        positions += range(start, start + count)
        q_starts.append(len(ids))
        kv_starts.append(len(kv_pages))
    arrays = batch_arrays(batch)
    assert [array.tolist() for array in arrays] == expected
    assert all(array.dtype == "int32" for array in arrays)
