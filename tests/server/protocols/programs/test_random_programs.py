"""Random programs with forks whose branches fail and whose clients leave: nothing is left of them, in any order."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_bodies import parse
from waiting import wait_until

from plait.runtime.process.engine import Engine
from plait.runtime.server.app import create_app
from plait.runtime.server.protocols.programs.program_compiler import compile_program
from plait.runtime.server.protocols.programs.program_run import ProgramRun
from plait.runtime.server.protocols.programs.types import ProgramRequest
from plait.runtime.server.settings import server_settings

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning", "error:coroutine")
PATIENCE_S = 60.0
FAILING = [{"timeout": 0.001, "max_tokens": 400}, {"regex": "("}, {"stop_token_ids": [1 << 30]}]
GEN = st.builds(
    lambda n, tokens, failure: [{"gen": {"name": "g", "n": n, "max_tokens": tokens, "ignore_eos": True} | failure}],
    st.integers(1, 3),
    st.sampled_from([1, 5, 20, 60]),
    st.sampled_from([{}] * 30 + FAILING),
)
READ = st.builds(
    lambda tokens: [{"gen": {"name": "r", "max_tokens": tokens}}, {"var": "r"}], st.sampled_from([1, 5, 20])
)
TEXT = st.sampled_from(["a", " b"] * 4 + ["c " * 12_000]).map(lambda text: [{"text": text}])  # the last takes a thread
SELECT = st.just([{"select": {"choices": ["x", "yy"]}}])


def sequence(nodes):
    return st.lists(nodes, min_size=1, max_size=3).map(lambda lists: [node for nodes in lists for node in nodes])


def with_forks(inner):
    fork = st.builds(
        lambda branches, join: [{"fork": {"branches": branches, "join": join}}],
        st.lists(inner, min_size=1, max_size=3),
        st.sampled_from(["gather", "append"]),
    )
    return sequence(st.one_of(fork, GEN, TEXT))


PROGRAMS = st.recursive(sequence(st.one_of(GEN, READ, TEXT, SELECT)), with_forks, max_leaves=6).map(
    lambda nodes: [{"text": "Once"}, *nodes, {"gen": {"max_tokens": 2}}]
)


@pytest.fixture(scope="module")
def small_engine(small_model):
    with Engine(str(small_model), max_pages=20_000, check_integrity=True, compile_deadline_s=60) as running:
        yield running


async def ask_and_leave(app, body, leave_after):
    """Sends a request and disconnects after so many events of the response or, if negative, of the event loop."""
    content, num_sent, must_leave = json.dumps(body).encode(), 0, asyncio.Event()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await must_leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal num_sent
        num_sent += message["type"] == "http.response.body"
        if num_sent == leave_after:
            must_leave.set()

    async def leave_early():
        for _ in range(-leave_after):
            await asyncio.sleep(0)
        must_leave.set()

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/programs", "raw_path": b"/v1/programs", "headers": headers}
    scope |= {"query_string": b"", "scheme": "http", "server": ("host", 80), "client": ("here", 1)}
    scope |= {"http_version": "1.1", "root_path": ""}
    leaving = asyncio.create_task(leave_early()) if leave_after < 0 else None
    await asyncio.wait_for(app(scope, receive, send), PATIENCE_S)
    if leaving is not None:
        await leaving


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(PROGRAMS, st.booleans(), st.integers(-60, 40)), min_size=1, max_size=3),
)
def test_nothing_is_left_of_a_program(small_engine, requests) -> None:
    """No session, call or held page, and never more calls in flight than were counted at admission."""
    app, loop = create_app(small_engine, server_settings(max_choices=256)), small_engine.engine_loop
    in_flight, limit, most = app.state.plait.in_flight, 0, 0
    for program, _, _ in requests:
        body = parse(json.dumps({"program": program}).encode(), ProgramRequest)
        limit += compile_program(body, 256).max_calls
    start = loop.calls.start

    def counting_start(session, call):
        nonlocal most
        start(session, call)
        most = max(most, len(loop.calls._sessions))

    async def go() -> None:
        num_tasks = len(asyncio.all_tasks())
        await asyncio.gather(
            *(ask_and_leave(app, {"program": program, "stream": stream}, at) for program, stream, at in requests)
        )
        while len(asyncio.all_tasks()) > num_tasks:  # a thread that still tokenizes for a program that has ended
            await asyncio.sleep(0.01)

    loop.calls.start = counting_start
    try:
        asyncio.run(asyncio.wait_for(go(), PATIENCE_S))
        assert (in_flight.num_admitted, app.state.plait.admission.queue.num_calls, len(in_flight.records)) == (0, 0, 0)
        assert wait_until(lambda: len(loop.sessions) == 0, PATIENCE_S)
    finally:
        loop.calls.start = start
    assert most <= limit
    assert loop.calls.num_open == 0 and not loop.batch_scheduler.has_work
    assert small_engine.client.status().used_pages == 0


def test_a_branch_that_goes_on_while_the_program_ends_starts_nothing() -> None:
    """It may go on in the same iteration of the event loop in which another one has failed."""
    program = ProgramRun(SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None)))  # type: ignore[arg-type]

    async def fail() -> None:
        raise ValueError

    async def follow() -> str:
        return "text"

    async def branch() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            program._start(follow())

    async def go() -> None:
        async with asyncio.TaskGroup() as program._tasks:
            program._tasks.create_task(branch())
            program._tasks.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(go())
    assert [type(error) for error in caught.value.exceptions] == [ValueError]
