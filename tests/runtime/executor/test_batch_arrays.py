"""`batch_arrays` against loops over the rows of random batches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.executor.batch_arrays import batch_arrays
from plait.runtime.kv_cache.sequence import Sequence

whole = st.integers(0, 6)
rows_of = st.lists(st.tuples(whole, st.integers(1, 5), whole), min_size=1, max_size=6)
decoding = st.lists(st.tuples(whole, st.just(1), st.just(0)), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(rows_of | decoding)
def test_arrays_equal_those_of_a_loop_over_rows(rows):
    """A row is (computed tokens, new tokens, new tokens without logits)."""
    batch, expected = Batch(10_000), [[] for _ in range(7)]
    ids, wanted, q_starts, kv_starts, kv_pages, positions, write_slots = expected
    q_starts.append(0)
    kv_starts.append(0)
    for number, (start, count, without) in enumerate(rows):
        seq = Sequence(("", ""), [100 * number + i for i in range(start + count)])
        pages = [1000 * number + 7 * i for i in range(start + count)]
        seq.pages.extend(pages)
        batch.add(Request(None, seq, 0, start + without), start, count)
        wanted += range(len(ids) + min(without, count), len(ids) + count)
        ids += seq.tokens.view()[start:].tolist()
        kv_pages += pages
        write_slots += pages[start:]
        positions += range(start, start + count)
        q_starts.append(len(ids))
        kv_starts.append(len(kv_pages))
    found = batch_arrays(batch)
    assert [each.tolist() for each in found] == expected
    assert all(each.dtype == "int32" for each in found)
