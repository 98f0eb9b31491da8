"""Frames with invalid messages: the valid ones are kept, invalid calls are answered, no other exception leaves."""

from __future__ import annotations

import msgspec
import pytest

from plait.runtime.call_reports import Usage
from plait.runtime.messages import Append, Close, Failed, Finished, Open, Select, Tokens
from plait.runtime.transport.frames import build_frame, decode_client_frame, decode_server_frame, encode

NOT_UTF8 = encode(Open(1, "abc")).replace(b"abc", b"a\xff\xfe")
DEEP = b"\x93\xa4Open\x01" + b"\x91" * 100_000 + b"\x01"
INVALID = [NOT_UTF8, DEEP, b"\x93\xa4Open\x01\xdb\xff\xff\xff\xff", b"\xc1", b"", b"\x91" * 100_000]


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_message_raises_nothing(message):
    decoded = decode_client_frame(build_frame([message]))
    assert (decoded.messages, decoded.failures, decoded.num_invalid) == ([], [], 1)
    with pytest.raises(msgspec.DecodeError):
        decode_server_frame(build_frame([message]))


def test_text_that_is_not_utf8_harms_no_other_message_of_its_frame():
    bad_call = encode(Select(5, 6, [[1]], "greedy_token_selection")).replace(b"greedy", b"gr\xff\xfedy")
    frame = build_frame([encode(Append(1, [2])), NOT_UTF8, bad_call, encode(Close(1))])
    decoded = decode_client_frame(frame)
    assert decoded.messages == [Append(1, [2]), Close(1)]
    assert decoded.num_invalid == 2
    assert [(failure.call, failure.kind) for failure in decoded.failures] == [(6, "invalid")]


def test_a_reply_that_cannot_be_read_fails_its_call_alone():
    bad = encode(Finished(7, "stop", Usage())).replace(b"stop", b"st\xffp")
    replies = decode_server_frame(build_frame([encode(Tokens(3, [1])), bad]))
    assert replies[0] == Tokens(3, [1])
    assert isinstance(replies[1], Failed) and (replies[1].call, replies[1].kind) == (7, "internal")
