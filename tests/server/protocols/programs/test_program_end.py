"""The end of a program before its calls have ended: every session is ended, those of forks and samples included."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import pytest
from json_bodies import parse
from waiting import wait_until

from plait.runtime.server.protocols.programs.program_compiler import compile_program
from plait.runtime.server.protocols.programs.program_run import ProgramRun
from plait.runtime.server.protocols.programs.types import ProgramRequest

PATIENCE_S = 60.0
GEN = {"gen": {"max_tokens": 2000, "ignore_eos": True}}
SAMPLES = {"gen": {"max_tokens": 2000, "ignore_eos": True, "n": 2}}
INNER = {"fork": {"branches": [[GEN], [GEN, GEN]]}}
FORKED = [{"text": "Once"}, {"fork": {"branches": [[GEN], [SAMPLES, GEN], [INNER]]}}]
NUM_CALLS = 5  # that FORKED has in flight


def assert_nothing_left(engine, state) -> None:
    def left():
        status = engine.client.status()
        return status.sessions, status.running_calls, status.waiting_calls, status.used_pages

    wait_until(lambda: left() == (0, 0, 0, 0), PATIENCE_S)
    assert left() == (0, 0, 0, 0)
    assert wait_until(lambda: state.in_flight.num_admitted == 0)
    assert (state.admission.queue.num_calls, state.in_flight.num_of_tenant("")) == (0, 0)


def running_calls(engine):
    return engine.client.status().running_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_ends_all_branches(serve, engine, stream) -> None:
    address, state = serve()
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"program": FORKED, "stream": stream}).encode()
    head = "POST /v1/programs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        assert wait_until(lambda: running_calls(engine) == NUM_CALLS, PATIENCE_S)
        assert state.admission.queue.num_calls == NUM_CALLS
    assert_nothing_left(engine, state)


@pytest.mark.parametrize(
    "failing",
    [
        {"gen": {"max_tokens": 2000, "ignore_eos": True, "timeout": 0.3}},
        {"gen": {"regex": "("}},
        {"gen": {"stop_token_ids": [1 << 30]}},
    ],
    ids=["timeout", "constraint", "argument"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_branch_that_fails_ends_the_others(serve, engine, failing, stream) -> None:
    address, state = serve()
    program = [*FORKED, {"fork": {"branches": [[GEN], [{"text": "x"}, failing]]}}]
    answer = httpx.post(f"{address}/v1/programs", json={"program": program, "stream": stream}, timeout=PATIENCE_S)
    text = answer.text.strip().split("data: ")[-1]
    assert json.loads(text)["error"]["param"].startswith("program[2].fork.branches[1][1].gen")
    assert_nothing_left(engine, state)


@pytest.mark.parametrize("stream", [False, True])
def test_a_drained_program_sends_its_error(serve, engine, stream) -> None:
    address, state = serve()
    answers = []

    def ask() -> None:
        body = {"program": FORKED, "stream": stream}
        answers.append(httpx.post(f"{address}/v1/programs", json=body, timeout=PATIENCE_S))

    asking = threading.Thread(target=ask)
    asking.start()
    assert wait_until(lambda: sum(record.num_tokens for record in list(state.in_flight.records)) > 10, PATIENCE_S)
    state.admission.is_draining = True
    assert state.in_flight.abort_all() == 1
    asking.join(PATIENCE_S)
    answer = answers[0]
    if stream:
        assert answer.text.count("event: error") == 1
        assert answer.text.strip().split("\n\n")[-1].startswith("event: error")
    else:
        assert answer.status_code == 503
    assert json.loads(answer.text.strip().split("data: ")[-1])["error"]["code"] == "aborted"
    assert_nothing_left(engine, state)


@pytest.mark.parametrize("step", [SAMPLES, INNER], ids=["samples", "fork"])
def test_sessions_opened_in_a_thread_after_the_cancellation_are_ended(engine, step, monkeypatch) -> None:
    """A long text is tokenized in a thread, which goes on when the program is cancelled."""
    tokenizer = engine.client.tokenizer
    encode, entered, may_go_on = tokenizer.encode, threading.Event(), threading.Event()

    def slow_encode(*arguments, **options):
        entered.set()
        assert may_go_on.wait(PATIENCE_S)
        return encode(*arguments, **options)

    monkeypatch.setattr(tokenizer, "encode", slow_encode)
    body = json.dumps({"program": [{"text": "One, " * 4500}, step]}).encode()
    program = compile_program(parse(body, ProgramRequest), 128)
    run = ProgramRun(engine.client)

    async def cancel_while_tokenizing() -> None:
        async def go() -> None:
            async with run.running(program, {}, tenant="", cache_salt="", priority=0):
                pass

        num_tasks = len(asyncio.all_tasks())
        task = asyncio.create_task(go())
        assert await asyncio.to_thread(entered.wait, PATIENCE_S)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        may_go_on.set()
        while len(asyncio.all_tasks()) > num_tasks:  # the thread's
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancel_while_tokenizing(), PATIENCE_S))
    assert wait_until(lambda: engine.client.status().sessions == 0, PATIENCE_S)
    assert engine.client.status().used_pages == 0
