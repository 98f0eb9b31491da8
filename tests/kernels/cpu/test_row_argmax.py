"""The output head's search for peaks, against numpy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu.row_argmax import row_argmax

values = st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, math.inf, -math.inf, math.nan])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 63, 64, 65, 1023, 1024, 1025, 2200]), st.integers(0, 1000), st.data())
def test_the_first_of_the_largest_is_numpys(width, seed, data):
    """Of whole numbers, so that many are equal, wherever the search's blocks end."""
    row = np.round(np.random.default_rng(seed).normal(size=width)).astype(np.float32)
    for _ in range(data.draw(st.integers(0, 3))):
        row[data.draw(st.integers(0, width - 1))] = data.draw(values)
    peak, place = row_argmax(row)
    first = int(row.argmax())
    assert (math.isnan(peak) and math.isnan(row[first])) or (peak, place) == (row[first], first)


def test_where_nothing_is_possible_the_first_place_comes_out():
    assert row_argmax(np.full(200, -np.inf, np.float32)) == (-math.inf, 0)
