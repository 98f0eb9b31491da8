"""The static inputs of captured steps have the values that a step operator by operator uploads, and padding."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synchronous_stream import ImmediateStream

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.executor.batch_arrays import batch_arrays
from plait.runtime.executor.gpu.graph_inputs import GraphInputs
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence

MAX_ROWS, MAX_TOKENS = 9, 40
rows_of = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([1, 1, 1, 2, 5])), min_size=1, max_size=MAX_ROWS - 1
)  # (computed tokens, new tokens), in any order


@settings(max_examples=60, deadline=None)
@given(rows_of, st.randoms(use_true_random=False))
def test_the_inputs_are_those_of_an_eager_step(rows, random):
    batch, pages = Batch(MAX_TOKENS), list(range(200))
    random.shuffle(pages)
    for cached, count in rows:
        seq = Sequence(CacheNamespace(), [random.randrange(1, 99) for _ in range(cached + count)])
        seq.pages.extend([pages.pop() for _ in range(cached + count)])
        batch.add(Request(None, seq, 0, len(seq) - 1), cached, count)
    inputs = GraphInputs(MAX_ROWS, MAX_TOKENS, 64, ImmediateStream(torch.device("cpu")))
    inputs.fill(batch, [])
    layout, expected, tokens = inputs.layout(MAX_ROWS, MAX_TOKENS, 5, False), batch_arrays(batch), batch.num_tokens
    inputs.write_page_table(layout)
    for found, wanted, padding in (
        (inputs.token_ids(MAX_TOKENS), expected.token_ids, 0),
        (layout.positions, expected.positions, 0),
        (layout.write_slots, expected.write_slots, -1),
        (layout.q_starts, expected.q_starts, tokens),
        (layout.kv_starts, expected.kv_starts, expected.kv_starts[-1]),
        (inputs.output_indices(MAX_ROWS), expected.output_indices, 0),
    ):
        np.testing.assert_array_equal(found[: len(wanted)].numpy(), wanted)
        assert (found[len(wanted) :] == padding).all()
    starts, firsts = expected.kv_starts, layout.page_starts.tolist()
    for row in range(len(rows)):
        wanted = expected.kv_pages[starts[row] : starts[row + 1]]
        np.testing.assert_array_equal(layout.kv_pages[firsts[row] : firsts[row] + len(wanted)].numpy(), wanted)
