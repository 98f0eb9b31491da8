"""The ZeroMQ server: invalid messages, oversized frames and floods."""

from __future__ import annotations

from pathlib import Path

import pytest
from echo_scheduler import TOKENIZER, start_call

from plait.runtime.call_reports import Usage
from plait.runtime.client.client import Client
from plait.runtime.errors import RUNTIME_EXITED, CallRejected
from plait.runtime.messages import Append, Embed, Failed, Finished, Generate, Open, Select, Tokens
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport import zmq_server
from plait.runtime.transport.frames import build_frame, decode_server_messages, encode
from plait.runtime.transport.zmq_client import ZmqClientTransport, ZmqConnection


@pytest.mark.parametrize(
    "invalid",
    [
        lambda session, call: Select(session, call, [[1]], "nope"),
        lambda session, call: Embed(session, call, "many"),
    ],
)
def test_a_bad_request_detaches_its_frame_alone(echo, invalid):
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    session = client.open_session()
    session.append("good")
    session._flush("gen")  # the text is in the frame of the invalid message
    bad_call = client.start_call(session.session_id, lambda call: invalid(session.session_id, call), None)
    with pytest.raises(CallRejected, match="refused"):
        bad_call.result(60)
    assert session.generate(sampling_params()).result(60).text == "good"
    assert echo.server.num_bad_frames == 1
    client.close()


def test_oversized_frames_are_rejected_and_the_client_can_continue(echo):
    connection = ZmqConnection(Path(echo.directory))
    connection.handshake(lambda: RUNTIME_EXITED)
    oversized_append = encode(Append(1, [7] * 3_000_000))
    for message in (oversized_append, encode(Select(1, 42, [[5] * 400_000])), b"\xff" * 200_000):
        connection.socket.send(build_frame([message]))
    requests = [Open(1), Append(1, [65, 66]), Generate(1, 43, sampling_params())]
    connection.socket.send(build_frame([encode(request) for request in requests]))
    replies = []
    while not (replies and isinstance(replies[-1], Finished)):
        assert connection.socket.poll(60_000)
        replies += decode_server_messages(connection.socket.recv())
    assert isinstance(replies[0], Failed) and (replies[0].call, replies[0].kind) == (42, "invalid")
    assert "above the limit" in replies[0].text
    assert replies[1:] == [Tokens(43, [65]), Tokens(43, [66]), Finished(43, "stop", Usage())]
    assert echo.server.num_bad_frames == 3
    connection.close()


def test_receive_returns_a_limited_number_of_messages(echo, monkeypatch):
    monkeypatch.setattr(zmq_server, "MAX_MESSAGES_PER_RECEIVE", 300)
    sizes, receive = [], echo.server.receive

    def receive_and_count(*args):
        messages = receive(*args)
        sizes.append(len(messages))
        return messages

    monkeypatch.setattr(echo.server, "receive", receive_and_count)
    client = Client(ZmqClientTransport(echo.directory), TOKENIZER)
    calls = [start_call(client, "abc")[1] for _ in range(2000)]
    assert {call.result(60).text for call in calls} == {"abc"}
    assert max(sizes) <= 300 + 256
    client.close()
