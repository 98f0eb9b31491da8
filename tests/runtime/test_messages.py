"""Replies as one frame."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.messages import Failed, Finished, Tokens, Usage, decode_replies, encode, frame_of

CALLS = st.integers(0, 2**63 - 1)
REPLIES = st.one_of(
    st.builds(Tokens, CALLS, st.lists(st.integers(0, 2**31), max_size=4)),
    st.builds(Failed, CALLS, st.text(max_size=8), st.text(max_size=8)),
    st.builds(Finished, CALLS, st.sampled_from(["stop", "length"]), st.just(Usage(3, 1, 2))),
)


@given(st.lists(REPLIES, max_size=40))
def test_a_frame_is_its_replies_in_order(replies):
    assert decode_replies(frame_of([encode(reply) for reply in replies])) == replies


def test_a_frame_of_many():
    replies = [Tokens(call, [call]) for call in range(70_000)]
    assert decode_replies(frame_of([encode(reply) for reply in replies])) == replies


def test_a_frame_that_is_cut_off_is_refused():
    with pytest.raises(msgspec.DecodeError):
        decode_replies(frame_of([encode(Tokens(1, [2]))])[:-1])
