"""How prefixes of whole values are compared: against single tokens, and in how many comparisons."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.scheduler.sequence_sampling.prefix_requests import begins_with, common_length

SHARED = st.lists(st.integers(0, 2), max_size=200)
END = st.lists(st.integers(0, 2), max_size=3)


@given(SHARED, END, END)
def test_lengths_are_those_of_single_comparisons(shared, one, other):
    a, b = [*shared, *one], (*shared, *other)
    expected = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    assert common_length(a, b) == common_length(tuple(a), b) == expected
    assert begins_with(b, a) == (expected == len(a))


class _Counted(int):
    comparisons = 0

    def __ne__(self, other):
        _Counted.comparisons += 1
        return int(self) != int(other)

    __hash__ = int.__hash__


def test_long_texts_that_differ_at_their_ends_are_compared_in_parts():
    """64 particles at 1,000 tokens compare 64 such pairs for each of them, several times in a step."""
    shared = [_Counted(token) for token in range(1000)]
    assert common_length([*shared, _Counted(1)], (*shared, _Counted(2))) == 1000
    assert 0 < _Counted.comparisons <= 64
