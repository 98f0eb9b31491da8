"""An ingress over real runtimes, one of them through a tunnel: answers, leaving replicas, and faults of replicas."""

from __future__ import annotations

import concurrent.futures
import json
import os
import resource
import signal
import threading
import time

import pytest
from local_replicas import local_replicas
from waiting import wait_until

from plait.runtime.cluster import replicated_transport
from plait.runtime.cluster.replicated_transport import UNANSWERED_S
from plait.runtime.server.deployment.listed_replicas import tell_replicas
from plait.runtime.server.engines import restarting_runtime

PROMPTS = [f"A tale of {number} boats:" for number in range(6)]


@pytest.fixture(scope="module")
def replicas():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(restarting_runtime, "STABLE_AFTER_S", 0.0)
        with local_replicas(deterministic=True, max_pages=6000, max_batch_tokens=2048) as running:
            yield running


@pytest.fixture(autouse=True)
def idle(replicas):
    """Before and after every test both replicas run and hold nothing."""
    assert wait_until(replicas.is_idle, 30)
    yield
    assert wait_until(replicas.is_idle, 30)


@pytest.fixture(scope="module")
def expected(replicas):
    """The answers to PROMPTS, one after the other."""
    return [text_of(replicas.ask(prompt)) for prompt in PROMPTS]


def text_of(answer) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def ask_all(replicas, prompts=PROMPTS, **fields) -> list:
    """The answers to prompts that are asked side by side."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: replicas.ask(prompt, **fields), prompts))


def begin_stream_on_each(replicas) -> dict[int, tuple[list[str], threading.Thread]]:
    """Streams that have begun, one on each replica: the events so far, and the thread that reads the rest."""
    streams = {}
    while len(streams) < 2:
        before = replicas.placed()
        events = replicas.stream(f"Stream {len(streams)}: " + "the sea, " * 40, max_tokens=300)
        seen = [next(events)]
        (number,) = [n for n, (now, then) in enumerate(zip(replicas.placed(), before, strict=True)) if now > then]
        assert number not in streams, "the second stream was placed beside the first one"
        thread = threading.Thread(target=lambda e=events, s=seen: s.extend(e), daemon=True)
        thread.start()
        streams[number] = seen, thread
    return streams


def test_answers_of_both_replicas_are_those_of_one(replicas, expected) -> None:
    before = replicas.placed()
    assert [text_of(answer) for answer in ask_all(replicas)] == expected
    assert all(now > then for now, then in zip(replicas.placed(), before, strict=True))


def test_a_flush_reaches_both_replicas(replicas) -> None:
    prompt, before = "The harbour master counted the boats. " * 20, replicas.placed()
    assert [cached_tokens(replicas, prompt) > 0 for _ in range(2)] == [False, True]
    assert sorted(now - then for now, then in zip(replicas.placed(), before, strict=True)) == [0, 2]
    assert replicas.http.post("/flush_cache").status_code == 200
    assert cached_tokens(replicas, prompt) == 0


def cached_tokens(replicas, prompt) -> int:
    return replicas.ask(prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_replica_that_leaves_ends_its_stream_and_gets_no_request(replicas, expected) -> None:
    streams = begin_stream_on_each(replicas)
    tell_replicas(["a"])
    assert wait_until(lambda: len(replicas.reports()) == 1)
    before = sum(replicas.placed())
    assert [text_of(answer) for answer in ask_all(replicas)] == expected
    assert sum(replicas.placed()) == before + len(PROMPTS)  # all on the one that is listed
    for seen, thread in streams.values():
        thread.join(60)
        assert seen[-1] == "[DONE]"
    tell_replicas(["a", "b"])


def test_a_runtime_killed_as_for_memory_costs_only_the_streams_that_began_there(replicas, expected) -> None:
    """The kernel's OOM killer sends SIGKILL to the process with the most memory, which is the runtime."""
    streams = begin_stream_on_each(replicas)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        before = sum(replicas.placed())
        answers = pool.submit(ask_all, replicas)
        assert wait_until(lambda: sum(replicas.placed()) >= before + len(PROMPTS))
        replicas.process("b").kill()
        assert [text_of(answer) for answer in answers.result(60)] == expected
    ends = []
    for _, (seen, thread) in sorted(streams.items()):
        thread.join(60)
        ends.append(seen[-1])
    assert ends[0] == "[DONE]" and json.loads(ends[1])["error"]["code"] == "runtime_gone"
    assert wait_until(lambda: replicas.states() == ["ready", "ready"])
    assert [replica["restarts"] for replica in replicas.reports()] == [0, 1]


def test_a_runtime_without_memory_fails_only_the_requests_that_need_it(replicas, expected, monkeypatch) -> None:
    """The logits of a whole prompt are one array of 190 MB, and a runtime has room for 38 MB: MemoryError in a step.

    The array does not fit either where the size was read while a new thread had 67 MB of addresses reserved by glibc.
    """
    monkeypatch.setattr(replicated_transport, "UNANSWERED_S", 60.0)  # a busy replica keeps what was placed on it
    process = replicas.process("b")
    assert wait_until(process.children)  # the compile processes, which it starts after a moment
    scored = {"echo": True, "logprobs": 1}
    prompts = [f"{number} " + "boats and " * 480 for number in range(2)]  # one for each replica
    limit = resource.prlimit(process.pid, resource.RLIMIT_AS)
    room = process.memory_info().vms + (36 << 20)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (room, limit[1]))
    try:
        before = replicas.placed()
        answers = ask_all(replicas, prompts, **scored)
        placed = [now - then for now, then in zip(replicas.placed(), before, strict=True)]
        assert [text_of(answer) for answer in ask_all(replicas)] == expected
        assert replicas.states() == ["ready", "ready"]
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_AS, limit)
    assert all(placed) and sorted(answer.status_code for answer in answers) == placed[0] * [200] + placed[1] * [500]
    again = [text_of(answer) for answer in ask_all(replicas, prompts, **scored)]
    assert all(text_of(a) == text for a, text in zip(answers, again, strict=True) if a.status_code == 200)


def test_a_replica_slow_by_ten_times_gets_less_of_the_load(replicas) -> None:
    """It runs for 10 ms of every 100. What it has is answered rightly, and most requests go to the other one."""
    process, is_over = replicas.process("b"), threading.Event()
    prompts = [f"A long tale of {number} boats:" for number in range(16)]
    expected = [text_of(replicas.ask(prompt, max_tokens=16)) for prompt in prompts]

    def slow_down() -> None:
        while not is_over.is_set():
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.01)

    thread = threading.Thread(target=slow_down)
    thread.start()
    before = replicas.placed()
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: replicas.ask(prompt, max_tokens=16), prompts))
    finally:
        is_over.set()
        thread.join()
    shares = [now - then for now, then in zip(replicas.placed(), before, strict=True)]
    assert [text_of(answer) for answer in answers] == expected
    assert sum(shares) == len(prompts) and shares[0] >= 2 * shares[1] > 0


def test_a_stopped_replica_keeps_no_request_that_can_run_elsewhere(replicas, expected) -> None:
    process = replicas.process("b")
    process.suspend()
    try:
        assert [text_of(answer) for answer in ask_all(replicas)] == expected
        assert wait_until(lambda: replicas.states() == ["ready", "unanswered"], 10 * UNANSWERED_S)
    finally:
        process.resume()
    assert wait_until(lambda: replicas.states() == ["ready", "ready"])


def test_a_connection_that_is_cut_is_opened_again(replicas, expected) -> None:
    """As when the network between two machines fails: the replica is the same one, and holds nothing any more."""
    streams = begin_stream_on_each(replicas)
    replicas.is_tunnel_open = False
    loop, tunnel = replicas._loop, replicas.tunnels[-1]
    loop.call_soon_threadsafe(lambda: setattr(tunnel, "closing", loop.create_task(tunnel.close())))
    assert wait_until(lambda: replicas.states() == ["ready", "restarting"])
    assert [text_of(answer) for answer in ask_all(replicas)] == expected
    assert wait_until(lambda: replicas.runtimes["b"].client.status().sessions == 0)
    restarts = replicas.reports()[1]["restarts"]
    replicas.is_tunnel_open = True
    assert wait_until(lambda: replicas.states() == ["ready", "ready"])
    assert replicas.reports()[1]["restarts"] == restarts
    for seen, thread in streams.values():
        thread.join(60)
        assert seen[-1] == "[DONE]" or json.loads(seen[-1])["error"]["code"] == "runtime_gone"
