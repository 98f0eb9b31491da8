"""The arrays of prefix groups in buffers of fixed size, as captured graphs read them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.kernels.layout import shared_prefix_arrays
from plait.runtime.executor.gpu import static_prefix_groups


@given(st.data(), st.integers(2, 40))
def test_static_arrays_hold_the_groups_of_the_batch(data, rows):
    """Reads the arrays as the kernel does. Values of an earlier batch must not remain."""
    lengths = static_prefix_groups.array_lengths(50, 100)
    host = {name: np.full(size, 77, dtype=np.int32) for name, size in lengths.items()}
    counts = np.array(data.draw(st.lists(st.integers(1, 2), min_size=rows, max_size=rows)), dtype=np.int32)
    order, groups = data.draw(st.permutations(range(rows))), []
    while len(order) > 1 and len(groups) < static_prefix_groups.max_groups(rows) and data.draw(st.booleans()):
        size = data.draw(st.integers(2, len(order)))
        groups.append((sorted(order[:size]), data.draw(st.integers(1, 99))))
        order = order[size:]
    static_prefix_groups.fill(host, shared_prefix_arrays(groups, counts) if groups else [])
    device = {name: torch.from_numpy(values) for name, values in host.items()}
    shared, firsts = static_prefix_groups.view(device, 50, 100), np.cumsum(counts) - counts
    assert len(shared.leader_rows) == static_prefix_groups.max_groups(50)
    starts = shared.starts.tolist()
    assert starts == sorted(starts) and starts[0] == 0
    for (members, length), start, end, leader in zip(
        groups, starts, starts[1:], shared.leader_rows.tolist(), strict=False
    ):
        assert leader in members
        expected_tokens = [int(firsts[row]) + i for row in members for i in range(counts[row])]
        assert shared.tokens[start:end].tolist() == expected_tokens
        for row in members:
            assert shared.lengths[row] == length
            assert shared.tokens[shared.token_offsets[row]] == firsts[row]
    assert set(starts[len(groups) :]) == {sum(int(counts[row]) for members, _ in groups for row in members)}
    ungrouped = set(range(50)) - {row for members, _ in groups for row in members}
    assert not any(shared.lengths[row] for row in ungrouped)
    if groups:
        assert [len(array) for array in shared_prefix_arrays(groups, counts)] == [
            rows,
            rows,
            len(groups) + 1,
            starts[-1],
            len(groups),
        ]
