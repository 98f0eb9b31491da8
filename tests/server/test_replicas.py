"""Two replicas of the embedded model behind one server: answers, hits, killed, stopped and flushed replicas.

The server runs in this process, so that a test sees where a request is; the replicas are real processes.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import threading

import httpx
import pytest
from asgi_server import serve_runtime
from waiting import wait_until

from plait.runtime.sampling_params import sampling_params
from plait.runtime.server import rerun
from plait.runtime.server.app import create_app
from plait.runtime.server.engines import restarting_runtime
from plait.runtime.server.engines.replicated_runtime import ReplicatedRuntime
from plait.runtime.server.settings import server_settings

SEEDED = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": 8}
LONG = {**SEEDED, "max_tokens": 4000, "stream": True}
COUNTERS = ("prompt_tokens", "cached_tokens", "computed_tokens")


class Served:
    """The server's address, its state, and its replicas."""

    def __init__(self, address, runtime, state) -> None:
        self.address, self.runtime, self.state = address, runtime, state
        self.transport = runtime._transport

    def post(self, path="/v1/completions", **body) -> httpx.Response:
        return httpx.post(self.address + path, json={"model": "default", **body}, timeout=200)

    def ask(self, prompt, **body) -> str:
        """The text of a completion."""
        answer = self.post(prompt=prompt, **{**SEEDED, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def ask_all(self, prompts, **body) -> list[str]:
        """The texts of completions that run side by side."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, **body), prompts))

    def status(self) -> dict:
        return httpx.get(self.address + "/status", timeout=60).json()

    def states(self) -> list[str]:
        return [replica["state"] for replica in self.status()["replicas"]]

    def signal(self, number, name) -> None:
        os.kill(self.runtime.replicas[number].client.model.server_pid, name)

    def calls(self, number) -> dict:
        """The calls that run or wait on a replica."""
        link = self.transport._links.get(number)
        return dict(link.calls) if link is not None else {}

    def counts(self) -> list[dict[str, int]]:
        statuses = [replica.client.status() for replica in self.runtime.replicas]
        return [{name: getattr(status, name) for name in COUNTERS} for status in statuses]

    def is_idle(self) -> bool:
        replicas = self.status()["replicas"]
        return all(r["state"] == "ready" and not r["load"] and not r["runtime"]["used_pages"] for r in replicas)


@pytest.fixture(scope="module")
def served():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(restarting_runtime, "STABLE_AFTER_S", 0.0)
        patch.setattr(rerun, "MAX_WAIT_S", 200.0)  # a busy machine starts a runtime slowly
        runtime = ReplicatedRuntime(None, ["cpu", "cpu"], progress=False, deterministic=True, max_pages=12_000)
        app = create_app(runtime, server_settings())
        with serve_runtime(app, runtime) as address:
            yield Served(address, runtime, app.state.plait)
        runtime.shutdown()


@pytest.fixture(autouse=True)
def idle(served):
    """Before and after every test both replicas run and nothing is placed on them."""
    assert wait_until(served.is_idle, 200)
    yield
    assert wait_until(served.is_idle, 200)


def one_engine(served, prompts, **fields) -> list[str]:
    """The answers of the first replica alone, one after the other."""
    client, texts = served.runtime.replicas[0].client, []
    for prompt in prompts:
        session = client.open_session()
        session.append(prompt)
        texts.append(session.generate(sampling_params(**{**SEEDED, **fields})).result(200).text)
        session.close()
    return texts


def test_answers_are_those_of_one_engine(served) -> None:
    prompts = [f"The number {number} is" for number in range(8)]
    assert served.ask_all(prompts) == one_engine(served, prompts)
    assert min(replica["placed"] for replica in served.status()["replicas"]) >= 3


def test_shared_prefixes_are_computed_on_one_replica(served) -> None:
    """Computed tokens as by one engine; placed without regard to prefixes, both replicas would compute most of them."""
    contexts = [f"Report {number}. " + f"Item {number} is in order. " * 40 for number in range(6)]
    prompts = [context + f"Question {number}:" for number in range(5) for context in contexts]
    client = served.runtime.replicas[0].client
    client.flush_cache()
    before = served.counts()[0]["computed_tokens"]
    expected = one_engine(served, prompts, max_tokens=1)
    alone = served.counts()[0]["computed_tokens"] - before
    served.runtime.client.flush_cache()
    assert wait_until(lambda: not any(served.transport.router.index._reported.values()))
    before = served.counts()
    placed = [replica["placed"] for replica in served.status()["replicas"]]
    assert served.ask_all(prompts, max_tokens=1) == expected
    computed = [
        now["computed_tokens"] - then["computed_tokens"] for now, then in zip(served.counts(), before, strict=True)
    ]
    assert sum(computed) <= 1.03 * alone and min(computed) > 0.15 * alone
    shares = [now["placed"] - then for now, then in zip(served.status()["replicas"], placed, strict=True)]
    assert sum(shares) == len(prompts) and min(shares) >= 5


def test_program_runs_on_one_replica(served) -> None:
    gen = {**SEEDED, "name": "a"}
    branches = [[{"text": f" {name}:"}, {"gen": {**gen, "name": name}}] for name in ("b", "c")]
    program = [{"text": "A list: "}, {"gen": gen}, {"fork": {"branches": branches}}, {"gen": {**gen, "name": "d"}}]
    before = served.counts()
    answer = served.post("/v1/programs", program=program)
    assert answer.status_code == 200 and set(answer.json()["variables"]) >= {"a", "b", "c", "d"}
    changed = [now["prompt_tokens"] > then["prompt_tokens"] for now, then in zip(served.counts(), before, strict=True)]
    assert sorted(changed) == [False, True]


def test_replica_killed_before_the_first_token(served) -> None:
    """Its requests run on the other replica."""
    prompts = [f"A tale of {number} cats:" for number in range(4)]
    expected = one_engine(served, prompts)
    for number in (0, 1):
        served.signal(number, signal.SIGSTOP)
    reruns = served.state.metrics.reruns.values[()]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(served.ask_all, prompts)
        assert wait_until(lambda: len(served.calls(0)) + len(served.calls(1)) == len(prompts))
        killed = len(served.calls(0))
        assert 0 < killed < len(prompts)
        served.signal(0, signal.SIGKILL)
        served.signal(1, signal.SIGCONT)
        assert answers.result(200) == expected
    assert served.state.metrics.reruns.values[()] == reruns + killed


def test_replica_killed_while_its_requests_run(served) -> None:
    """Streams that began get their error, all others their answer, and every request has exactly one end."""
    prompts = [f"A tale of {number} dogs:" for number in range(6)]
    expected = one_engine(served, prompts, max_tokens=16)
    begun, ends = threading.Semaphore(0), []

    def stream(number) -> None:
        body = {"model": "default", "prompt": f"Stream {number}:", **LONG}
        with httpx.stream("POST", f"{served.address}/v1/completions", json=body, timeout=200) as answer:
            lines = answer.iter_lines()
            next(lines)
            begun.release()
            errors = [json.loads(line[6:])["error"]["code"] for line in lines if '"error"' in line]
        ends.append((answer.status_code, errors))

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=60)
    num_lost, num_placed = len(served.calls(0)), sum(served.transport.num_placed.values())
    assert 0 < num_lost < len(threads)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(served.ask_all, prompts, max_tokens=16)
        assert wait_until(lambda: sum(served.transport.num_placed.values()) == num_placed + len(prompts))
        served.signal(0, signal.SIGKILL)
        assert answers.result(200) == expected
    assert httpx.get(served.address + "/ready", timeout=60).status_code == 200
    assert wait_until(lambda: len(ends) >= num_lost)
    served.state.in_flight.abort_all()
    for thread in threads:
        thread.join(60)
    assert all(status == 200 and len(errors) == 1 for status, errors in ends)
    codes = [code for _, errors in ends for code in errors]
    assert len(codes) == len(threads) and codes.count("runtime_gone") == num_lost


def test_stopped_replica_keeps_no_request_that_can_run_elsewhere(served) -> None:
    prompts = [f"A tale of {number} mice:" for number in range(4)]
    expected = one_engine(served, prompts)
    served.signal(0, signal.SIGSTOP)
    try:
        assert served.ask_all(prompts) == expected  # some of them were placed on the stopped one
        assert served.states() == ["unanswered", "ready"]
        assert httpx.get(served.address + "/ready", timeout=60).status_code == 200
        placed = served.status()["replicas"][0]["placed"]
        assert served.ask_all(prompts) == expected
        assert served.status()["replicas"][0]["placed"] == placed
        metrics = httpx.get(served.address + "/metrics", timeout=60).text
        assert 'plait_runtime_up{replica="0"} 0\n' in metrics and 'plait_runtime_up{replica="1"} 1\n' in metrics
        assert served.post("/flush_cache").status_code == 503
    finally:
        served.signal(0, signal.SIGCONT)
    assert wait_until(lambda: served.states() == ["ready", "ready"])


def test_request_on_a_stopped_replica_keeps_its_timeout(served) -> None:
    for number in (0, 1):
        served.signal(number, signal.SIGSTOP)
    try:
        assert served.post(prompt="One, two,", **SEEDED, timeout=1.0).status_code == 504
    finally:
        for number in (0, 1):
            served.signal(number, signal.SIGCONT)


def test_flush_of_one_replica_is_heard(served) -> None:
    context = "The weather report. " * 40
    served.ask(context)
    index = served.transport.router.index
    assert wait_until(lambda: any(index._reported.values()))
    for replica in served.runtime.replicas:
        replica.client.flush_cache()
    assert wait_until(lambda: not any(index._reported.values()))
    (answer,) = one_engine(served, [context])
    assert served.ask(context) == answer


def test_client_that_leaves_while_its_request_waits(served) -> None:
    for number in (0, 1):
        served.signal(number, signal.SIGSTOP)
    try:
        body = {"model": "default", "prompt": "One, two,", **LONG, "stream": False}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(served.address + "/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
        assert wait_until(lambda: not served.state.in_flight.records)
    finally:
        for number in (0, 1):
            served.signal(number, signal.SIGCONT)


def test_metrics_name_the_replica(served) -> None:
    served.ask("One, two,")
    text = httpx.get(served.address + "/metrics", timeout=60).text
    for number in (0, 1):
        assert f'plait_runtime_up{{replica="{number}"}} 1\n' in text
        assert f'plait_prompt_tokens_total{{replica="{number}"}}' in text
        assert f'plait_router_placed_total{{replica="{number}"}}' in text
    status = served.status()
    for name in COUNTERS:
        assert status["runtime"][name] == sum(replica["runtime"][name] for replica in status["replicas"])
