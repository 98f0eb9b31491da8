"""Micro-batches: together they compute what the step does, and every KV is written before it is read."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.layout import SHARED_ALIGN, shared_prefix_arrays
from plait.runtime.executor.batch_arrays import BatchArrays, starts
from plait.runtime.executor.distributed.rank_runner import CUT_ALIGN, StepCosts, micro_batch_ends, split_step

rows_of = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 5) | st.integers(1, 400), st.integers(0, 3)), min_size=1, max_size=7
)
COSTS = StepCosts(weights=20.0, kv=0.05)


def step(rows):
    """The arrays of rows (cached tokens, new tokens, how many of the last ones have outputs)."""
    counts = np.array([count for _, count, _ in rows], np.int32)
    lengths = np.array([start + count for start, count, _ in rows], np.int32)
    q_starts, kv_starts = starts(counts), starts(lengths)
    pages = np.random.default_rng(len(rows)).permutation(int(kv_starts[-1])).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + count, dtype=np.int32) for start, count, _ in rows])
    slots = np.concatenate(
        [pages[end - count : end] for count, end in zip(counts, kv_starts[1:], strict=True)], dtype=np.int32
    )
    outputs = [
        token
        for (_, count, wanted), end in zip(rows, q_starts[1:], strict=True)
        for token in range(end - min(wanted, count), end)
    ]
    tokens = np.arange(q_starts[-1], dtype=np.int32) + 1000
    return BatchArrays(tokens, np.array(outputs, np.int32), q_starts, kv_starts, pages, positions, slots)


def tokens_of(arrays):
    """For every new token: (id, position, slot, the pages that it reads, whether its state is an output)."""
    outputs, result = set(arrays.output_indices.tolist()), []
    for row in range(len(arrays.q_starts) - 1):
        pages = arrays.kv_pages[arrays.kv_starts[row] : arrays.kv_starts[row + 1]].tolist()
        first, end = arrays.q_starts[row], arrays.q_starts[row + 1]
        for token in range(first, end):
            seen = len(pages) - (end - 1 - token)
            assert arrays.positions[token] == seen - 1
            assert 0 < seen <= len(pages)
            result.append(
                (arrays.token_ids[token], seen - 1, arrays.write_slots[token], pages[:seen], token in outputs)
            )
    return result


@settings(max_examples=120, deadline=None)
@given(rows_of, st.lists(st.integers(1, 2000), max_size=4))
def test_parts_have_the_tokens_of_the_step_with_what_they_read(rows, cuts):
    arrays = step(rows)
    total = len(arrays.token_ids)
    ends = sorted({cut for cut in cuts if cut < total} | {total})
    parts = [part for part, _ in split_step(arrays, (), ends)]
    assert [token for part in parts for token in tokens_of(part)] == tokens_of(arrays)
    assert list(itertools.accumulate(len(part.token_ids) for part in parts)) == ends
    for part in parts:
        assert all(array.dtype == np.int32 for array in part)
        assert part.q_starts[0] == part.kv_starts[0] == 0 and part.kv_starts[-1] == len(part.kv_pages)
        assert (np.diff(part.q_starts) > 0).all()


@settings(max_examples=120, deadline=None)
@given(rows_of, st.integers(1, 5))
def test_prompts_are_cut_at_multiples_of_tokens_of_their_text_and_other_rows_not(rows, num_stages):
    arrays = step(rows)
    ends = micro_batch_ends(arrays, num_stages, COSTS)
    total = len(arrays.token_ids)
    assert ends[-1] == total and ends == sorted(set(ends)) and ends[0] > 0
    if num_stages == 1:
        assert ends == [total]
    for end in ends[:-1]:
        row = int(np.searchsorted(arrays.q_starts, end, side="right")) - 1
        if end != arrays.q_starts[row]:
            assert arrays.q_starts[row + 1] - arrays.q_starts[row] >= 2 * CUT_ALIGN
            assert arrays.positions[end] % CUT_ALIGN == 0


def test_work_is_divided_where_that_takes_less_time_than_reading_the_weights_again():
    prompt, decode = step([(0, 1280, 1)]), step([(100, 1, 1)] * 8)
    assert micro_batch_ends(prompt, 2, COSTS) == [128, 320, 512, 640, 768, 960, 1152, 1280]
    assert micro_batch_ends(decode, 2, COSTS) == [4, 8]  # 8 tokens that read 808 of KV: 48 units
    assert micro_batch_ends(decode, 2, COSTS._replace(kv=0.0)) == [8]
    both = step([(500, 1, 1)] * 16 + [(0, 600, 1)])
    assert micro_batch_ends(both, 3, COSTS)[:4] == [4, 8, 12, 16]  # rows of little arithmetic that read much


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.lists(st.integers(1, 11), max_size=3))
def test_shared_prefixes_are_those_of_the_rows_of_each_part(group_of_row, cuts):
    """A row is in the group of its number; 0: in none. Its new tokens are as many."""
    rows = [(3 * SHARED_ALIGN, max(1, number), 1) for number in group_of_row]
    arrays = step(rows)
    q_lens = [count for _, count, _ in rows]

    def groups(first, end):
        members = {n: [row for row in range(first, end) if group_of_row[row] == n] for n in (1, 2, 3)}
        return [([row - first for row in rows], n * SHARED_ALIGN) for n, rows in members.items() if len(rows) > 1]

    if not groups(0, len(rows)):
        return
    shared = shared_prefix_arrays(groups(0, len(rows)), q_lens)
    row_ends = sorted({cut for cut in cuts if cut < len(rows)} | {len(rows)})
    parts = split_step(arrays, shared, [int(arrays.q_starts[end]) for end in row_ends])
    for (_, part), (first, end) in zip(parts, itertools.pairwise([0, *row_ends]), strict=True):
        expected = shared_prefix_arrays(groups(first, end), q_lens[first:end]) if groups(first, end) else ()
        assert [array.tolist() for array in part] == [array.tolist() for array in expected]
        assert all(array.dtype == np.int32 for array in part)


def test_a_row_that_is_cut_is_in_no_group():
    arrays = step([(SHARED_ALIGN, 200, 1), (SHARED_ALIGN, 1, 1), (SHARED_ALIGN, 1, 1)])
    shared = shared_prefix_arrays([([0, 1, 2], SHARED_ALIGN)], [200, 1, 1])
    (_, first), (part, second) = split_step(arrays, shared, [64, 202])
    assert first == () and len(part.q_starts) == 4
    expected = shared_prefix_arrays([([1, 2], SHARED_ALIGN)], [136, 1, 1])
    assert [array.tolist() for array in second] == [array.tolist() for array in expected]
