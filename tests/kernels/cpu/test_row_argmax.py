"""The argmax of a row of logits, against numpy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import compiled_kernel

from plait.kernels.cpu import row_argmax as product

values = st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, math.inf, -math.inf, math.nan])


@compiled_kernel
def _argmax(row, highest, index):
    highest[0], index[0] = product.row_argmax(row)


def row_argmax(row):
    """As in the product, called from Python."""
    highest, index = np.zeros(1, np.float32), np.zeros(1, np.int64)
    _argmax(row, highest, index)
    return highest[0], int(index[0])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 63, 64, 65, 1023, 1024, 1025, 2200]), st.integers(0, 1000), st.data())
def test_row_argmax_finds_the_first_maximum(width, seed, data):
    """Rows of integers, so that many are equal, of widths around the search's chunks."""
    row = np.round(np.random.default_rng(seed).normal(size=width)).astype(np.float32)
    for _ in range(data.draw(st.integers(0, 3))):
        row[data.draw(st.integers(0, width - 1))] = data.draw(values)
    highest, index = row_argmax(row)
    expected = int(row.argmax())
    assert (math.isnan(highest) and math.isnan(row[expected])) or (highest, index) == (row[expected], expected)


def test_row_of_minus_infinity_yields_the_first_index():
    assert row_argmax(np.full(200, -np.inf, np.float32)) == (-math.inf, 0)
