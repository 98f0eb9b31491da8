"""Frames of messages between client and scheduler: encoding, splitting, and limits on their contents."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.constrained.specs import Choices, Structural
from plait.runtime.call_reports import Usage
from plait.runtime.errors import InputError
from plait.runtime.messages import (
    MAX_APPEND_TOKENS,
    MAX_CHOICES,
    MAX_FORK_CHILDREN,
    Append,
    Close,
    Embed,
    Failed,
    Finished,
    Fork,
    Generate,
    Select,
    Tokens,
)
from plait.runtime.sampling_params import SamplingParams, sampling_params
from plait.runtime.scheduler.sessions.validation import MAX_CHOICE_TOKENS
from plait.runtime.transport import frames as frames_module
from plait.runtime.transport.frames import (
    MAX_FRAME_BYTES,
    MAX_MESSAGES_PER_FRAME,
    MessageHeader,
    build_frame,
    build_frames,
    decode_client_messages,
    decode_server_messages,
    encode,
    encode_client_message,
    split_client_frame,
)

CALLS = st.integers(0, 2**63 - 1)
REPLIES = st.one_of(
    st.builds(Tokens, CALLS, st.lists(st.integers(0, 2**31), max_size=4)),
    st.builds(Failed, CALLS, st.text(max_size=8), st.text(max_size=8)),
    st.builds(Finished, CALLS, st.sampled_from(["stop", "length"]), st.just(Usage(3, 1, 2))),
    st.builds(lambda call, data: Finished(call, "stop", Usage(3, 1, 2), embedding=data), CALLS, st.binary(max_size=64)),
)


@given(st.lists(REPLIES, max_size=40))
def test_a_frame_decodes_to_its_replies_in_order(replies):
    assert decode_server_messages(build_frame([encode(reply) for reply in replies])) == replies


def test_a_frame_of_70000_replies():
    replies = [Tokens(call, [call]) for call in range(70_000)]
    assert decode_server_messages(build_frame([encode(reply) for reply in replies])) == replies


def test_a_truncated_frame_raises():
    with pytest.raises(msgspec.DecodeError):
        decode_server_messages(build_frame([encode(Tokens(1, [2]))])[:-1])


REQUESTS = st.one_of(
    st.builds(Append, CALLS, st.lists(st.integers(0, 2**31), max_size=MAX_APPEND_TOKENS // 50)),
    st.builds(Select, CALLS, CALLS, st.lists(st.lists(st.integers(0, 2**31), min_size=1, max_size=9), max_size=9)),
    st.builds(lambda session, call: Generate(session, call, SamplingParams()), CALLS, CALLS),
    st.builds(Embed, CALLS, CALLS, st.integers(0, 4096), st.sampled_from([None, True, False])),
    st.builds(Close, CALLS),
)


@given(st.lists(REQUESTS, max_size=40), st.integers(1, 60))
def test_requests_keep_their_order_and_frames_stay_within_the_limits(requests, times):
    requests = requests * times
    frames = list(build_frames(map(encode_client_message, requests)))
    assert [request for frame in frames for request in decode_client_messages(frame)] == requests
    for frame in frames:
        assert len(frame) <= MAX_FRAME_BYTES
        assert 1 <= len(decode_client_messages(frame)) <= MAX_MESSAGES_PER_FRAME
        assert [decode_client_messages(one)[0] for one in split_client_frame(frame)] == decode_client_messages(frame)


def test_the_largest_valid_requests_fit_in_a_frame():
    schema = '"' + "x" * ((1 << 20) - 2) + '"'
    triggers = Structural([(f"<{i:03}>", schema, "</>") for i in range(7)])
    largest = [
        Append(1, [2**31] * MAX_APPEND_TOKENS),
        Select(1, 2, [[2**31] * (MAX_CHOICE_TOKENS // MAX_CHOICES)] * MAX_CHOICES),
        Fork(1, list(range(2**32, 2**32 + MAX_FORK_CHILDREN))),
        Generate(
            1, 2, sampling_params(stop=["é" * 512 for _ in range(64)], logit_bias=dict.fromkeys(range(1024), 1.0))
        ),
        Generate(1, 2, SamplingParams(), Choices(tuple(f"{i:0100}" for i in range(10_000)))),
        Generate(1, 2, SamplingParams(), triggers),
    ]
    frames = list(build_frames(map(encode_client_message, largest)))
    assert [request for frame in frames for request in decode_client_messages(frame)] == largest
    with pytest.raises(InputError, match="above the limit"):
        encode_client_message(
            Generate(1, 2, SamplingParams(), Structural([(f"<{i:03}>", schema, "</>") for i in range(8)]))
        )


@pytest.mark.parametrize(
    "request_", [Append(1, [5] * 2_000_000), Select(7, 8, [[5] * 300_000]), Select(7, 8, [[5], [5] * 300_000])]
)
def test_an_oversized_request_is_rejected_before_decoding(monkeypatch, request_):
    monkeypatch.setattr(frames_module, "_decode_client_messages", lambda frame: pytest.fail("the frame was decoded"))
    frame = build_frame([encode(request_)])
    for read in (decode_client_messages, split_client_frame):
        with pytest.raises(msgspec.DecodeError, match="above the limit"):
            read(frame)


@pytest.mark.parametrize(
    "request_",
    [
        Append(1, [5] * (MAX_APPEND_TOKENS + 1)),
        Fork(1, [5] * (MAX_FORK_CHILDREN + 1)),
        Select(1, 2, [[5]] * (MAX_CHOICES + 1)),
        Generate(1, 2, SamplingParams(stop_token_ids=(1,) * 257)),
        Generate(1, 2, SamplingParams(stop=("a",) * 65)),
        Generate(1, 2, SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))),
    ],
)
def test_lists_beyond_their_limit_raise(request_):
    with pytest.raises(msgspec.DecodeError, match="length"):
        decode_client_messages(build_frame([encode(request_)]))


def test_a_frame_of_too_many_requests_raises():
    frame = build_frame([encode(Close(1))] * (MAX_MESSAGES_PER_FRAME + 1))
    for read in (decode_client_messages, split_client_frame):
        with pytest.raises(msgspec.DecodeError, match="length"):
            read(frame)


@given(CALLS, CALLS, st.binary(max_size=9))
def test_the_header_of_a_truncated_frame_is_parsed(session, call, random_bytes):
    for request in (Select(session, call, [[1]]), Generate(session, call, SamplingParams())):
        frame = build_frame([encode(request)])
        assert MessageHeader.parse(frame) == (type(request).__name__.encode(), [session, call])
        assert (
            MessageHeader.parse(frame[: len(frame) // 2]) is None or MessageHeader.parse(frame[: len(frame) // 2]).kind
        )
    MessageHeader.parse(random_bytes)
    MessageHeader.parse(build_frame([random_bytes]))
