"""Requests through an ingress: the same answers as from one server, and faults of replicas."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from typing import Any

import httpx
import pytest
from asgi_server import serve_app, wait_until
from local_replicas import IngressApp, LocalReplicas

from plait.runtime.server.deployment import replica_directory
from plait.runtime.server.settings import server_settings

MESSAGES = [{"role": "user", "content": "Name a colour."}]
TOKENS = {"temperature": 0, "max_tokens": 6}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
PROGRAM: list[dict[str, Any]] = [{"text": "A colour: "}, {"gen": {"name": "colour", "max_tokens": 4}}]
PROGRAM += [{"text": " and a number: "}, {"select": {"name": "number", "choices": ["one", "two"]}}]
STORY = [{"role": "user", "content": "Write a long story about the sea and its ships."}]
LONG: dict[str, dict[str, Any]] = {
    "chat": {"messages": STORY, "max_tokens": 200},
    "messages": {"messages": STORY, "max_tokens": 200},
    "generate": {"sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}},
    "ollama": {"prompt": STORY[0]["content"], "options": {"num_predict": 200}},
    "responses": {"input": STORY[0]["content"], "max_output_tokens": 200},
    "programs": {"program": [{"text": "Hello"}, {"gen": {"name": "text", "max_tokens": 200}}]},
}
TEXT = "The same beginning of many requests. " * 20
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "default", "messages": MESSAGES, "n": 2, **TOKENS}),
    "json": (
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            **TOKENS,
        },
    ),
    "completions": ("/v1/completions", {"model": "default", "prompt": ["One", "Two"], "logprobs": 2, **TOKENS}),
    "responses": ("/v1/responses", {"model": "default", "input": "Hi", "temperature": 0, "max_output_tokens": 16}),
    "messages": ("/v1/messages", {"model": "default", "messages": MESSAGES, **TOKENS}),
    "generate": ("/generate", {"text": "Hello", "sampling_params": {"temperature": 0, "max_new_tokens": 6}}),
    "ollama": (
        "/api/generate",
        {"model": "default", "prompt": "Hi", "stream": False, "options": {"temperature": 0, "num_predict": 6}},
    ),
    "programs": ("/v1/programs", {"model": "default", "program": PROGRAM, "defaults": {"temperature": 0}}),
    "tokenize": ("/tokenize", {"model": "default", "prompt": "Hello"}),
    "count": ("/v1/messages/count_tokens", {"model": "default", "messages": MESSAGES}),
    "wrong field": ("/v1/completions", {"model": "default", "prompt": "x", "bad": 1}),
    "wrong schema": ("/v1/completions", {"model": "default", "prompt": "x", "regex": "(", **TOKENS}),
    "no model": ("/v1/chat/completions", {"model": "another", "messages": MESSAGES}),
    "too long": ("/v1/completions", {"model": "default", "prompt": "word " * 9000}),
}
STREAMS = ("chat", "completions", "responses", "messages", "generate", "ollama", "programs")
VARYING = {"id", "created", "created_at", "completed_at", "request_id", "e2e_latency", "load_duration"}
VARYING |= {"total_duration", "prompt_eval_duration", "eval_duration", "input_tokens"}
VARYING |= {"cached_tokens", "cache_read_input_tokens", "cache_write_tokens"}


def stable(value: Any) -> Any:
    """The value without ids, times and counts of cached tokens."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in VARYING}
    return [stable(item) for item in value] if isinstance(value, list) else value


class Ingress:
    def __init__(self, url: str, replicas: LocalReplicas, app: IngressApp) -> None:
        self.url, self.replicas, self.app = url, replicas, app
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: str = "Hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "default", "prompt": prompt, **TOKENS, **fields})

    def replica_states(self) -> list[str]:
        return [replica["state"] for replica in self.http.get("/status").json()["replicas"]]


@pytest.fixture
def start(engine):
    """`start(models=..., **settings)` serves an ingress in front of the replicas "a" and "b" in this process."""
    with contextlib.ExitStack() as stack:

        def start(models=None, ids=("a", "b"), **settings):
            checked = server_settings(max_queue_time_s=0, **settings)
            replicas = LocalReplicas(engine, checked, models)
            app = IngressApp(replicas, checked, list(ids))
            return Ingress(stack.enter_context(serve_app(app)), replicas, app)

        yield start


@pytest.fixture
def ingress(start):
    return start()


def test_answers_are_those_of_one_server(ingress, serve):
    direct = httpx.Client(base_url=serve()[0], timeout=60)
    for name, (path, body) in REQUESTS.items():
        expected, got = direct.post(path, json=body), ingress.post(path, body)
        assert got.status_code == expected.status_code, got.text
        assert stable(got.json()) == stable(expected.json()), name
        assert got.headers["content-type"] == expected.headers["content-type"]
        assert got.headers["x-request-id"].startswith("req-")
        assert len(got.headers.get_list("x-request-id")) == 1


def test_streams_are_those_of_one_server(ingress, serve):
    direct = httpx.Client(base_url=serve()[0], timeout=60)

    def text_of(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[Any, str]:
        answer = http.post(path, json=body | {"stream": True})
        lines = [line for line in answer.text.splitlines() if line]
        events = [line for line in lines if line.startswith("event: ")]
        return (answer.status_code, answer.headers["content-type"], list(dict.fromkeys(events)), lines[-1][:13])

    for name in STREAMS:
        path, body = REQUESTS[name]
        assert text_of(ingress.http, path, body) == text_of(direct, path, body), name


def test_a_faulty_request_and_one_without_calls_reach_no_replica(ingress):
    for name in ("tokenize", "count", "wrong field", "no model", "too long"):
        ingress.post(*REQUESTS[name])
    assert not ingress.replicas.asked


def test_keys_are_checked_before_anything_is_forwarded(start):
    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
    ingress = start(api_keys={"one": digest})
    assert ingress.complete().status_code == 401
    assert not ingress.replicas.asked
    answer = ingress.http.post(
        "/v1/completions",
        json={"model": "default", "prompt": "Hello", **TOKENS},
        headers={"Authorization": "Bearer secret"},
    )
    assert answer.status_code == 200 and sum(ingress.replicas.asked.values()) == 1


def test_a_program_runs_whole_on_one_replica(ingress):
    assert ingress.post(*REQUESTS["programs"]).status_code == 200
    assert sum(ingress.replicas.asked.values()) == 1


def test_requests_with_one_prefix_go_to_one_replica_and_others_are_spread(ingress):
    for _ in range(4):
        assert ingress.complete(TEXT).status_code == 200
    assert sorted(ingress.replicas.asked.values()) == [4]
    assert ingress.complete("Another text. " * 40).status_code == 200
    assert sorted(ingress.replicas.asked.values()) == [1, 4]


def test_usage_is_counted_at_the_ingress(ingress):
    ingress.complete()
    ingress.http.post("/v1/completions", json={"model": "default", "prompt": "Hi", "stream": True, **TOKENS})
    text = ingress.http.get("/metrics").text
    assert "plait_time_to_first_token_seconds_count 2" in text
    assert 'plait_runtime_up{replica="1"} 1' in text
    assert wait_until(lambda: 'plait_router_load_tokens{replica="0"} 0' in ingress.http.get("/metrics").text)


def test_a_flush_reaches_every_replica(ingress):
    assert ingress.post("/flush_cache", {}).status_code == 200
    assert ingress.replicas.asked == {"a": 1, "b": 1}
    ingress.replicas.faults["b"] = "dead"
    assert ingress.post("/flush_cache", {}).status_code == 503


def test_a_dead_replica_costs_no_request(ingress):
    ingress.complete(TEXT)
    (first,) = ingress.replicas.asked
    ingress.replicas.faults[first] = "dead"
    answer = ingress.complete(TEXT)
    assert answer.status_code == 200
    assert "plait_reruns_total 1" in ingress.http.get("/metrics").text
    assert wait_until(lambda: "restarting" in ingress.replica_states())
    del ingress.replicas.faults[first]
    assert wait_until(lambda: ingress.replica_states() == ["ready", "ready"])


def test_a_request_waits_for_the_only_replica(start):
    ingress = start(ids=["a"])
    ingress.complete()
    ingress.replicas.faults["a"] = "dead"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(ingress.complete)
        assert wait_until(lambda: ingress.replicas.asked["a"] == 2)
        del ingress.replicas.faults["a"]
        assert answer.result().status_code == 200


def test_requests_of_a_silent_replica_run_elsewhere(ingress, monkeypatch):
    monkeypatch.setattr(replica_directory, "UNANSWERED_S", 0.2)
    monkeypatch.setattr(replica_directory, "NOT_READY_AFTER_S", 0.4)
    ingress.complete(TEXT)
    (first,) = ingress.replicas.asked
    ingress.replicas.faults[first] = "silent"
    assert ingress.complete(TEXT).status_code == 200
    assert "unanswered" in ingress.replica_states()
    assert wait_until(lambda: not ingress.replicas.open[first])  # the request to it was given up


def test_a_slow_replica_answers(ingress):
    ingress.replicas.faults |= {"a": 0.2, "b": 0.2}
    answer = ingress.complete()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("chat", lambda event: event["error"]["code"]),
        ("completions", lambda event: event["error"]["code"]),
        ("generate", lambda event: event["error"]["code"]),
        ("responses", lambda event: event["code"]),
        ("programs", lambda event: event["error"]["code"]),
        ("messages", lambda event: {"overloaded_error": "runtime_gone"}[event["error"]["type"]]),
        ("ollama", lambda event: {True: "runtime_gone"}["runtime process has ended" in event["error"]]),
    ],
)
def test_a_stream_that_had_begun_ends_with_the_error_of_its_protocol(ingress, name, error):
    ingress.replicas.faults |= {"a": "cut", "b": "cut"}
    path, body = REQUESTS[name]
    longer = LONG.get(name, {"max_tokens": 200})
    answer = ingress.post(path, body | longer | {"stream": True})
    assert answer.status_code == 200, answer.text
    last = [line for line in answer.text.splitlines() if line][-1].removeprefix("data: ")
    assert error(json.loads(last)) == "runtime_gone"
    assert sum(ingress.replicas.asked.values()) == 1


def test_a_replica_with_other_model_files_is_refused(start):
    ingress = start(models={"b": "other files"})
    assert ingress.complete("Anything. " * 30).status_code == 200
    assert ingress.complete("Something else. " * 30).status_code == 200
    assert ingress.replicas.asked == {"a": 2}
    assert sorted(ingress.replica_states()) == ["ready", "refused"]


def test_the_calls_of_a_client_that_left_are_ended(ingress, idle):
    with contextlib.suppress(httpx.TimeoutException):
        body = {"model": "default", "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True}
        httpx.post(f"{ingress.url}/v1/completions", json=body, timeout=0.3)
    assert wait_until(lambda: sum(ingress.replicas.asked.values()) == 1)
    assert wait_until(lambda: not sum(ingress.replicas.open.values()))
    assert wait_until(lambda: ingress.http.get("/status").json()["in_flight"] == 0)
    client = ingress.app.directory.client
    assert not client._calls and not client._transport._calls and not client._transport._routes
