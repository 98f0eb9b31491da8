"""Floods of mutated frames: nothing that arrives ends a loop, leaves anything behind, or lets a call wait for ever."""

from __future__ import annotations

from example_share import share_of
from frame_flood import flood_client, flood_scheduler, flood_sockets


def test_mutated_requests_leave_the_scheduler_intact():
    num_frames = share_of(24_000)
    counts = flood_scheduler(num_frames, seed=11)
    assert min(counts["messages"], counts["invalid"]) > num_frames / 3
    assert counts["grown_kib"] < 64 << 10


def test_mutated_replies_let_no_call_wait():
    counts = flood_client(4000, seed=12)
    assert counts["disconnected"] and counts["internal"] and counts["finished"]


def test_mutated_frames_and_garbage_through_real_sockets():
    assert flood_sockets(1000, seed=13)["bad_frames"] > 500
