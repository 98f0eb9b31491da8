"""Partitioning a step's rows between threads."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu.amx import PASS_ROWS
from plait.kernels.cpu.row_partition import partition_bounds


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 64))
def test_partitions_cover_all_rows_in_complete_passes_of_similar_number(rows, partitions):
    bounds = [partition_bounds(i, partitions, rows) for i in range(partitions)]
    assert bounds[0][0] == 0 and bounds[-1][1] == rows
    assert all(first[1] == second[0] for first, second in itertools.pairwise(bounds) if first[1] < rows)
    assert all(begin % PASS_ROWS == 0 for begin, end in bounds if begin < end)
    passes = -(-rows // PASS_ROWS)
    sizes = [-(-(end - begin) // PASS_ROWS) for begin, end in bounds]
    assert all(passes // partitions <= size <= -(-passes // partitions) for size in sizes)
