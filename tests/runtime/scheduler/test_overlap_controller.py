"""The controller that disables overlap when too many tokens are discarded."""

from __future__ import annotations

from plait.runtime.scheduler.overlap import OverlapController


def test_a_high_discard_rate_disables_overlap():
    overlap_controller = OverlapController()
    for _ in range(30):
        overlap_controller.record_outcome(8, 8)
    assert overlap_controller.is_worthwhile
    for _ in range(30):
        overlap_controller.record_outcome(8, 5)
    assert not overlap_controller.is_worthwhile
    overlap_controller.record_outcome(0, 0)
    for _ in range(30):
        overlap_controller.record_outcome(8, 8)
    assert overlap_controller.is_worthwhile
