"""Errors that a client receives from a runtime process, and arguments that it rejects before sending."""

from __future__ import annotations

import collections
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import zmq
from runtime_helpers import LONG, open_session
from waiting import wait_until

from plait.constrained import Choices, Regex
from plait.runtime.errors import (
    Aborted,
    CallRejected,
    ConstraintFailed,
    ContextOverflow,
    DeadlineExceeded,
    InputError,
    RuntimeGone,
)
from plait.runtime.messages import Select
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params
from plait.runtime.transport.zmq_client import ZmqClientTransport
from plait.runtime.transport.zmq_server import FRAMES_SOCKET


def test_all_waiting_calls_fail_after_the_scheduler_is_killed():
    """At the end of the process, not of the liveness checks, which would take two minutes and give another reason."""
    with Runtime(progress=False, max_pages=4000) as runtime:
        other = Runtime.connect(runtime.address)
        calls = [open_session(r, f"Story {i}").generate(LONG) for i in range(10) for r in (runtime, other)]
        outcomes = []

        def read(call):
            try:
                outcomes.append(call.result())
            except RuntimeGone as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=read, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        assert next(calls[0].iter_text())
        os.kill(runtime.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == len(calls)
        assert all("the runtime process ended" in message for message in outcomes)
        with pytest.raises(RuntimeGone):
            runtime.client.open_session()
        with pytest.raises(RuntimeGone):
            calls[0].result()
        other.shutdown()


def test_invalid_frames_of_an_unregistered_socket_are_counted_and_ignored(runtime):
    before = runtime.client.status().bad_frames
    context = zmq.Context()
    unregistered = context.socket(zmq.DEALER)
    unregistered.connect(f"ipc://{Path(runtime.address) / FRAMES_SOCKET}")
    for frame in (b"", b"\xff\xff", b"\x93\xa5Close\x01", os.urandom(2000), b"\xdd\xff\xff\xff\xff"):
        unregistered.send(frame)
    unregistered.send_multipart([b"a", b"b"])
    assert wait_until(lambda: runtime.client.status().bad_frames >= before + 6)
    unregistered.close(0)
    context.term()
    assert open_session(runtime).generate(sampling_params(max_tokens=2)).result().finish_reason == "length"


def test_calls_raise_the_error_of_their_cause(runtime, monkeypatch):
    monkeypatch.setattr("plait.runtime.client.call.DEADLINE_GRACE_S", 60)  # the scheduler reports the deadline
    with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.2 s"):
        open_session(runtime).generate(sampling_params(max_tokens=4000, ignore_eos=True, timeout_s=0.2)).result()
    with pytest.raises(ContextOverflow, match="the context holds 8192"):
        open_session(runtime, "word " * 9000).generate(LONG).result()
    with pytest.raises(ConstraintFailed):
        open_session(runtime).generate(LONG, Regex("a(b")).result()
    call = open_session(runtime).generate(LONG)
    assert next(call.iter_text())
    call.abort()
    with pytest.raises(Aborted):
        call.result()
    slow = open_session(runtime).generate(LONG)
    with pytest.raises(DeadlineExceeded, match="it is still running"):
        slow.result(timeout_s=0.05)
    slow.abort()
    with pytest.raises(Aborted):
        slow.result()
    session = open_session(runtime)
    invalid = session.generate(LONG, Regex("(("))
    later = session.generate(LONG)
    with pytest.raises(ConstraintFailed, match="cannot continue"):
        later.result()
    with pytest.raises(ConstraintFailed):
        invalid.result()
    assert open_session(runtime).generate(sampling_params(max_tokens=3)).result().usage.completion_tokens == 3


def test_invalid_arguments_raise_before_anything_is_sent(runtime):
    session = runtime.client.open_session()
    with pytest.raises(InputError, match="empty"):
        session.generate(LONG)
    session.append("x")
    for choices in ([], [""], ["a", "a"], "ab", [1]):
        with pytest.raises(InputError):
            session.select(choices)
    for size in (0, -1, True, 1.5, 10**9):
        with pytest.raises(InputError):
            session.fork(size)
    with pytest.raises(InputError, match="vocabulary"):
        session.generate(sampling_params(stop_token_ids=[10**6]))
    unencodable = runtime.client.open_session()
    unencodable.append("\ud800")
    with pytest.raises(InputError):
        unencodable.generate(LONG)
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.append("more")


def test_constraints_are_enforced_by_the_runtime_process(runtime):
    session = open_session(runtime, "My number is")
    call = session.generate(sampling_params(max_tokens=30, temperature=1.0), Regex(r" [0-9]{3}-[0-9]{4}"))
    result = call.result()
    assert (len(result.text), result.finish_reason) == (9, "stop")
    assert result.text[1:4].isdigit() and result.text[4] == "-"
    animal = session.generate(sampling_params(temperature=1.5), Choices((" cat", " catfish", " dog"))).result()
    assert animal.text in (" cat", " catfish", " dog")


def test_a_call_to_a_stopped_runtime_raises_after_its_timeout():
    with Runtime(progress=False, max_pages=500) as runtime:
        assert next(open_session(runtime).generate(LONG).iter_text())
        os.kill(runtime.pid, signal.SIGSTOP)
        try:
            call = open_session(runtime).generate(sampling_params(timeout_s=0.5))
            with pytest.raises(DeadlineExceeded, match="did not answer"):
                call.result()
        finally:
            os.kill(runtime.pid, signal.SIGCONT)


def test_a_silent_runtime_raises_runtime_gone(monkeypatch):
    counts = collections.defaultdict(lambda: [0])  # of unanswered checks, by transport
    count = property(lambda transport: counts[transport][-1], lambda transport, count: counts[transport].append(count))
    monkeypatch.setattr(ZmqClientTransport, "_unanswered_checks", count, raising=False)
    with Runtime(progress=False, max_pages=500) as runtime:
        runtime.client.set_liveness_check(0.05, 60.0)
        seen = counts[runtime.client._transport]
        assert wait_until(lambda: seen.count(1) >= 10), "idle, but it answers the checks"
        assert open_session(runtime).generate(sampling_params(max_tokens=2)).result().token_ids
        call = open_session(runtime).generate(LONG)
        assert next(call.iter_text())
        os.kill(runtime.pid, signal.SIGSTOP)
        runtime.client.set_liveness_check(0.05, 0.5)  # one that is stopped never answers
        try:
            with pytest.raises(RuntimeGone, match=r"has not answered for 0\.5 s"):
                call.result()
        finally:
            os.kill(runtime.pid, signal.SIGCONT)


def test_invalid_messages_are_rejected_by_the_client_or_the_scheduler(runtime):
    session = open_session(runtime)
    with pytest.raises(InputError, match="select method"):
        session.select([" a", " b"], method="nope")
    with pytest.raises(InputError, match="constraint"):
        session.generate(LONG, "abc")
    with pytest.raises(InputError, match="timeout_s"):
        session.select([" a", " b"], timeout_s="5")
    for settings in ({"priority": 2**70}, {"priority": 1.5}, {"tenant": "\ud800"}, {"tenant": "x" * 1000}):
        with pytest.raises(InputError):
            runtime.client.open_session(**settings)
    session._flush("gen")
    call = runtime.client.start_call(
        session.session_id, lambda call: Select(session.session_id, call, [[1]], "nope"), None
    )
    with pytest.raises(CallRejected, match="refused"):
        call.result(10)


def test_a_distant_deadline_does_not_end_an_idle_runtime(runtime):
    result = open_session(runtime).select([" a", " b"], timeout_s=604_000.0).result()
    assert result.choice is not None
    time.sleep(0.3)
    assert wait_until(lambda: runtime.client.status().running_calls == 0)
