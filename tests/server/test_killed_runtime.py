"""The runtime process is killed at every moment of a request: what had sent nothing is answered all the same.

The server runs in this process, so that a test sees how far a request is; the runtime is a real process with the
embedded model.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading

import httpx
import openai
import pytest
from asgi_server import serve_runtime
from batch_clients import create, end_of, results
from waiting import wait_until

from plait.runtime.client.call import DEADLINE_GRACE_S
from plait.runtime.server import rerun
from plait.runtime.server.app import create_app
from plait.runtime.server.batches import line_runner
from plait.runtime.server.engines import restarting_runtime
from plait.runtime.server.engines.restarting_runtime import RestartingRuntime
from plait.runtime.server.settings import server_settings

TURNS = [{"role": "user", "content": "Tell a tale"}]
SEEDED = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": 24}
LONG_PROMPT = "The cat sat on the mat. " * 300
COMPLETION = ("/v1/completions", {"model": "default", "prompt": "Once upon a time", "n": 2, **SEEDED})
PREFILL = ("/v1/completions", {"model": "default", "prompt": LONG_PROMPT, **SEEDED, "max_tokens": 4})
CHAT = (
    "/v1/chat/completions",
    {"model": "default", "messages": TURNS, **SEEDED},
)
GEN = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
PROGRAM = (
    "/v1/programs",
    {
        "program": [
            {"text": "A list of animals: "},
            {"gen": {"name": "first", **GEN}},
            {"fork": {"branches": [[{"text": " and"}, {"gen": {"name": "more", **GEN}}]] * 2, "join": "append"}},
            {"gen": {"name": "last", **GEN}},
        ]
    },
)
REQUESTS = {"completion": COMPLETION, "chat": CHAT, "program": PROGRAM, "prefill": PREFILL}


class KeptRecords(set):
    """The records of the requests in flight; `added` has those that ended, too."""

    def __init__(self) -> None:
        super().__init__()
        self.added = []

    def add(self, record) -> None:
        self.added.append(record)
        super().add(record)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(address, RestartingRuntime, AppState). Restarts have no backoff."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restarting_runtime, "STABLE_AFTER_S", 0.0)
        patch.setattr(rerun, "MAX_WAIT_S", 200.0)  # a busy machine starts a runtime slowly
        runtime = RestartingRuntime(progress=False, deterministic=True, max_pages=12_000)
        patch.setattr(line_runner, "FIRST_PAUSE_S", 0.05)
        files = tmp_path_factory.mktemp("files")
        app = create_app(runtime, server_settings(files_dir=str(files)))
        app.state.plait.in_flight.records = KeptRecords()
        with serve_runtime(app, runtime) as address:
            yield address, runtime, app.state.plait
        runtime.shutdown()


@pytest.fixture
def kill(served):
    """Kills the runtime process, by its id, and waits until this process knows."""
    _, runtime, _ = served
    assert wait_until(lambda: not runtime.client.is_closed, 200)

    def kill() -> None:
        client = runtime.client
        os.kill(client.model.server_pid, signal.SIGKILL)
        assert wait_until(lambda: client.is_closed)

    return kill


@pytest.fixture(scope="module")
def expected(served):
    """The content of the answer to each request when nothing happens."""
    address, _, _ = served
    return {
        name: content(httpx.post(address + path, json=body, timeout=200)) for name, (path, body) in REQUESTS.items()
    }


def content(answer: httpx.Response):
    """The generated part of an answer, without ids and times."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"] if "choices" in body else (body["variables"], body["text"])


class Asked:
    """A request in a thread, with its record in the server. `answer()` waits for the response."""

    def __init__(self, served, path, body) -> None:
        address, _, state = served
        added = state.in_flight.records.added
        num_before = len(added)
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(httpx.post(address + path, json=body, timeout=200))
        )
        self._thread.start()
        assert wait_until(lambda: len(added) > num_before)
        self.record = added[num_before]

    def wait_for(self, condition) -> None:
        """Waits until `condition(record)` holds, or the request has ended."""
        assert wait_until(lambda: condition(self.record) or self.record.end_time, 60)

    def answer(self) -> httpx.Response:
        self._thread.join(200)
        return self._answers[0]


def ask_all(served) -> dict[str, Asked]:
    """Sends all kinds of requests but the long prompt; they run side by side."""
    return {name: Asked(served, *REQUESTS[name]) for name in ("completion", "chat", "program")}


def test_killed_before_the_requests(served, kill, expected) -> None:
    kill()
    for name, asked in ask_all(served).items():
        assert content(asked.answer()) == expected[name], name


def test_killed_while_queued(served, kill, expected) -> None:
    """The stream of a chat has sent nothing either, and is run again too."""
    os.kill(served[1].client.model.server_pid, signal.SIGSTOP)  # so that none begins
    requests = ask_all(served)
    path, body = CHAT
    stream = Asked(served, path, body | {"stream": True})
    for asked in (*requests.values(), stream):
        asked.wait_for(lambda record: record.calls)
    kill()
    events = [line.removeprefix("data: ") for line in stream.answer().text.splitlines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == expected["chat"][0]["message"]["content"]
    assert sum("role" in delta for delta in deltas) == 1
    for name, asked in requests.items():
        assert content(asked.answer()) == expected[name], name
        assert asked.record.num_runs == 2 and asked.record.code is None and asked.record.failure() is None, name


def test_killed_while_prefilling(served, kill, expected) -> None:
    """A fast answer may be complete before the kill."""
    client = served[1].client
    client.flush_cache()
    before = client.status().computed_tokens
    asked = Asked(served, *PREFILL)
    asked.wait_for(lambda record: record.calls and client.status().computed_tokens > before + 256)
    kill()
    was_answered = asked.record.num_tokens == PREFILL[1]["max_tokens"] and asked.record.num_runs == 1
    assert content(asked.answer()) == expected["prefill"]
    assert asked.record.num_runs == (1 if was_answered else 2)


@pytest.mark.parametrize(("name", "num_tokens"), [("completion", 1), ("program", 23)])
def test_killed_while_decoding(served, kill, expected, name, num_tokens) -> None:
    """All kinds of requests run; the kill comes when one has so many tokens. A fast answer may be complete before."""
    requests = ask_all(served)
    requests[name].wait_for(lambda record: record.num_tokens >= num_tokens)
    kill()
    for other, asked in requests.items():
        assert content(asked.answer()) == expected[other], other


def test_killed_before_the_last_token(served, kill, expected) -> None:
    asked = Asked(served, *CHAT)
    asked.wait_for(lambda record: record.num_tokens >= SEEDED["max_tokens"] - 1)
    kill()
    assert content(asked.answer()) == expected["chat"]


LONG_COMPLETION = (COMPLETION[0], COMPLETION[1] | {"max_tokens": 4000})
LONG_GEN = {"gen": {"name": "first", **GEN, "max_tokens": 4000}}
LONG_PROGRAM = (PROGRAM[0], {"program": [{"text": "A list of animals: "}, LONG_GEN, *PROGRAM[1]["program"][2:]]})


def test_streams_that_began_end_with_their_error_and_are_not_run_again(served, kill) -> None:
    address, runtime, _ = served
    with contextlib.ExitStack() as stack:
        begun = []
        for path, body in (LONG_COMPLETION, LONG_PROGRAM):
            stream = httpx.stream("POST", address + path, json=body | {"stream": True}, timeout=200)
            lines = stack.enter_context(stream).iter_lines()
            assert next(line for line in lines if line)
            begun.append(lines)
        kill()
        for lines in begun:
            events = [line for line in lines if line.startswith("data: ")]
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "runtime_gone"
    assert wait_until(lambda: not runtime.client.is_closed, 200)
    assert runtime.client.status().prompt_tokens == 0


def test_request_that_ends_two_runtimes_is_not_run_a_third_time(served, kill) -> None:
    path, body = COMPLETION
    _, runtime, _ = served
    asked = Asked(served, path, body | {"max_tokens": 2000})
    for num_runs in (1, 2):
        asked.wait_for(lambda record, num_runs=num_runs: record.num_runs == num_runs and record.num_tokens > 2)
        kill()
    answer = asked.answer()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "runtime_gone"
    assert "ended 2 times while it ran this request" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
    assert wait_until(lambda: not runtime.client.is_closed, 200)
    assert runtime.client.status().prompt_tokens == 0


def test_line_of_a_batch_that_ends_two_runtimes_is_not_run_a_third_time(served, kill) -> None:
    """The line beside it was in one of the runtimes, and is answered: after that, both run alone."""
    address, runtime, state = served
    added, before = state.in_flight.records.added, len(state.in_flight.records.added)
    killing, other = ({**COMPLETION[1], "n": 1, "max_tokens": count} for count in (4000, 400))
    items = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
        for name, body in (("killing", killing), ("other", other))
    ]
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=200)
    batch = create(client, items, "/v1/completions")

    def runs_of(number: int) -> list:
        return [record for record in added[before:] if record.client_request_id == f"{batch.id}:{number}"]

    def all_run() -> bool:
        return all(any(record.num_tokens > 2 and not record.end_time for record in runs_of(n)) for n in (1, 2))

    assert wait_until(all_run, 60)
    kill()
    assert wait_until(lambda: len(runs_of(1)) == 2 and runs_of(1)[1].num_tokens > 2, 200)
    kill()
    answers, errors = results(client, end_of(client, batch))
    assert list(answers) == ["other"] and errors["killing"]["response"]["status_code"] == 503
    assert len(runs_of(1)) == 2
    assert wait_until(lambda: not runtime.client.is_closed, 200)


def test_timeout_counts_from_the_first_run(served, kill) -> None:
    path, body = COMPLETION
    asked = Asked(served, path, body | {"max_tokens": 8000, "timeout": 2.0, "n": 1})
    asked.wait_for(lambda record: record.num_tokens > 2)
    kill()
    assert asked.answer().status_code == 504
    for call in asked.record.calls:  # of the last run; none if no runtime was ready in time
        assert call.deadline - DEADLINE_GRACE_S <= asked.record.deadline + 0.001
