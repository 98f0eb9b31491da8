"""Reference operators that read a shared prefix in the pages of its group's leader, as the GPU kernels do.

With them, wrong or stale prefix groups yield wrong tokens or an AssertionError.
"""

from __future__ import annotations

from dataclasses import replace

import reference_fused
from recorded_graphs import as_kernel

from plait.kernels.layout import AttentionLayout, PrefixSharingCost


def with_leader_pages(layout: AttentionLayout) -> AttentionLayout:
    """The layout with each member's pages of the shared prefix replaced by its leader's.

    Raises AssertionError for groups that contradict themselves or reach into a member's new tokens.
    """
    shared, pages = layout.shared, layout.kv_pages.clone()
    if shared is None:
        return layout
    q_starts, kv_starts = layout.q_starts.tolist(), layout.kv_starts.tolist()
    firsts, lengths = layout.first_pages.tolist(), shared.lengths.tolist()
    members = {}
    bounds = shared.starts.tolist()
    for leader, start, end in zip(shared.leader_rows.tolist(), bounds, bounds[1:], strict=False):
        tokens = shared.tokens[start:end].tolist()
        for row in range(layout.num_rows):
            new = list(range(q_starts[row], q_starts[row + 1]))
            if not new or new[0] not in tokens:
                continue
            offset = shared.token_offsets[row].item()
            assert shared.tokens[offset : offset + len(new)].tolist() == new
            assert start <= offset and offset + len(new) <= end
            assert row not in members and lengths[row] == lengths[leader] > 0
            assert lengths[row] <= kv_starts[row + 1] - kv_starts[row] - len(new)
            members[row] = leader
            own, leaders = firsts[row], firsts[leader]
            pages[own : own + lengths[row]] = layout.kv_pages[leaders : leaders + lengths[row]]
    assert sorted(members) == [row for row, length in enumerate(lengths) if length]
    assert bounds[-1] == sum(q_starts[row + 1] - q_starts[row] for row in members)
    return replace(layout, kv_pages=pages)


def attention(q, layer, layout, *, out=None):
    return reference_fused.attention(q, layer, with_leader_pages(layout), out=out)


def prefix_sharing_cost(shape, max_q_len):
    """A cost by which any common prefix, from one token on, is worth sharing."""
    return PrefixSharingCost(align=1, group_cost=0, min_saved_tokens=1, max_row_tokens=max_q_len)


LEADER_READS = replace(
    reference_fused.REFERENCE_FUSED_OPERATORS,
    rotate_and_write=as_kernel(reference_fused.rotate_and_write),
    attention=attention,
    bind_attention=reference_fused.binding(attention),
    group_rows=as_kernel(reference_fused.REFERENCE_FUSED_OPERATORS.group_rows),
    add_low_rank=as_kernel(reference_fused.REFERENCE_FUSED_OPERATORS.add_low_rank),
    prefix_sharing_cost=prefix_sharing_cost,
)
