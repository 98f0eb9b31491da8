"""Reference operators that read a shared prefix in its leader's pages, as the GPU's kernels do.

Groups that are wrong, stale or mixed up give wrong tokens, or say so. Knows: layouts. Must not know: how groups are
found.
"""

from __future__ import annotations

from dataclasses import replace

from plait.kernels import fused
from plait.kernels.layout import AttentionLayout, Sharing


def led(layout: AttentionLayout) -> AttentionLayout:
    """The layout in which each member's pages of the prefix are its leader's. AssertionError for groups that contradict
    themselves or reach into a member's new tokens."""
    shared, pages = layout.shared, layout.kv_pages.clone()
    if shared is None:
        return layout
    q_starts, kv_starts = layout.q_starts.tolist(), layout.kv_starts.tolist()
    firsts, lengths = layout.first_pages.tolist(), shared.lengths.tolist()
    members = {}
    bounds = shared.starts.tolist()
    for leader, start, end in zip(shared.leaders.tolist(), bounds, bounds[1:], strict=False):
        tokens = shared.tokens[start:end].tolist()
        for row in range(layout.num_rows):
            new = list(range(q_starts[row], q_starts[row + 1]))
            if not new or new[0] not in tokens:
                continue
            at = shared.places[row].item()
            assert shared.tokens[at : at + len(new)].tolist() == new and start <= at and at + len(new) <= end
            assert row not in members and lengths[row] == lengths[leader] > 0
            assert lengths[row] <= kv_starts[row + 1] - kv_starts[row] - len(new)
            members[row] = leader
            own, led_by = firsts[row], firsts[leader]
            pages[own : own + lengths[row]] = layout.kv_pages[led_by : led_by + lengths[row]]
    assert sorted(members) == [row for row, length in enumerate(lengths) if length]
    assert bounds[-1] == sum(q_starts[row + 1] - q_starts[row] for row in members)
    return replace(layout, kv_pages=pages)


def attend(qkv, cos, sin, cache, layout, *more):
    return fused.attend(qkv, cos, sin, cache, led(layout), *more)


def sharing(shape, most):
    """Any two rows that have one token in common share it."""
    return Sharing(align=1, cost=0, least=1, widest=most)


LED = replace(fused.REFERENCE, attend=attend, sharing=sharing)
