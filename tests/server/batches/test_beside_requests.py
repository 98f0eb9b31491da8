"""A batch beside other requests: they are never refused because of it, and its own calls are bounded."""

from __future__ import annotations

import json

import httpx
import pytest
from asgi_server import serve_app
from prometheus_scrape import scrape
from waiting import wait_until

from plait.runtime.process.engine import Engine
from plait.runtime.server.app import create_app
from plait.runtime.server.http.api_keys import digest
from plait.runtime.server.settings import server_settings

ASK = {"model": "default", "prompt": "One, two,", "max_tokens": 4}
LONG = {"model": "default", "prompt": "One, two,", "max_tokens": 3000, "ignore_eos": True}


def create_batch(address, bodies, url="/v1/completions", **headers):
    items = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    data = "\n".join(map(json.dumps, items)).encode()
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in", data)}}
    file_id = httpx.post(f"{address}/v1/files", **form, headers=headers).json()["id"]
    body = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
    return httpx.post(f"{address}/v1/batches", json=body, headers=headers).json()["id"]


def lines_in_flight(state):
    return [record for record in tuple(state.in_flight.records) if record.is_background]


def cancel(address, batch_id, **headers):
    httpx.post(f"{address}/v1/batches/{batch_id}/cancel", headers=headers)
    url = f"{address}/v1/batches/{batch_id}"
    assert wait_until(lambda: httpx.get(url, headers=headers).json()["status"] == "cancelled")


def test_it_takes_no_room_from_others(serve, tmp_path, idle) -> None:
    """Room for one call, in a server with a queue time, and one request of the key: all go to the request."""
    address, state = serve(
        files_dir=str(tmp_path), max_running=1, max_queue=0, max_queue_time_s=0.3, max_requests_per_key=1,
        max_batch_calls=3, api_keys={"ann": digest(b"key")},
    )  # fmt: skip
    key = {"authorization": "Bearer key"}
    batch_id = create_batch(address, [LONG] * 10, **key)
    assert wait_until(lambda: len(lines_in_flight(state)) == 3)
    for _ in range(4):
        assert httpx.post(f"{address}/v1/completions", json=ASK, headers=key, timeout=60).status_code == 200
        assert httpx.get(f"{address}/ready").status_code == 200
        assert len(lines_in_flight(state)) == 3
    assert {record.num_key_requests for record in lines_in_flight(state)} == {0}
    cancel(address, batch_id, **key)
    assert wait_until(lambda: not lines_in_flight(state))


@pytest.mark.parametrize("limit", [{"max_requests_per_key": 8}, {"max_running": 6, "max_queue": 2}])
def test_a_line_has_the_limits_of_a_request_that_is_alone(serve, tmp_path, idle, limit) -> None:
    address, _ = serve(files_dir=str(tmp_path), api_keys={"ann": digest(b"key")}, **limit)
    key, drawn = {"authorization": "Bearer key"}, {**ASK, "regex": "[a-z]{1,3}"}
    bodies = [drawn | how for how in ({"particles": 9}, {"particles": 3, "n": 3}, {"particles": 8}, {"exact": True})]
    batch_id = create_batch(address, bodies, **key)
    with httpx.Client(base_url=address, headers=key, timeout=60) as client:
        expected = [client.post("/v1/completions", json=body) for body in bodies]
        assert wait_until(lambda: client.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
        batch = client.get(f"/v1/batches/{batch_id}").json()
        texts = [client.get(f"/v1/files/{batch[name]}/content").text for name in ("output_file_id", "error_file_id")]
    rows = {row["custom_id"]: row["response"] for text in texts for row in map(json.loads, text.splitlines())}
    for number, answer in enumerate(expected):
        assert rows[str(number)]["status_code"] == answer.status_code == (400 if number < 2 else 200)
        assert rows[str(number)]["body"].get("error") == answer.json().get("error")


def test_choices_count_as_calls(serve, tmp_path, idle) -> None:
    address, state = serve(files_dir=str(tmp_path), max_batch_calls=4)
    batch_id = create_batch(address, [LONG | {"n": 3}] * 6)
    slots = state.batches._slots
    assert wait_until(lambda: slots.num_calls == 6)
    assert len(lines_in_flight(state)) == 2, "the second was begun below the limit, a third was not"
    cancel(address, batch_id)
    assert wait_until(lambda: slots.num_calls == 0)


def test_keys_take_turns(serve, tmp_path, idle) -> None:
    address, _ = serve(
        files_dir=str(tmp_path), max_batch_calls=1, api_keys={name: digest(name.encode()) for name in ("ann", "bob")}
    )
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    first = create_batch(address, [ASK | {"prompt": f"{n} ", "max_tokens": 20} for n in range(40)], **ann)
    second = create_batch(address, [ASK], **bob)
    url = f"{address}/v1/batches/{second}"
    assert wait_until(lambda: httpx.get(url, headers=bob).json()["status"] == "completed")
    counts = httpx.get(f"{address}/v1/batches/{first}", headers=ann).json()["request_counts"]
    assert counts["completed"] < 40
    cancel(address, first, **ann)


def test_metrics_keep_its_times_apart(serve, tmp_path, idle) -> None:
    address, _ = serve(files_dir=str(tmp_path))
    batch_id = create_batch(address, [ASK, ASK | {"nope": 1}])
    url = f"{address}/v1/batches/{batch_id}"
    assert wait_until(lambda: httpx.get(url).json()["status"] == "completed")
    values = scrape(address)
    statuses = {
        dict(labels)["status"]: value
        for (name, *labels), value in values.items()
        if name == "plait_request_seconds_count" and dict(labels)["route"] == "batch /v1/completions"
    }
    assert statuses == {"200": 1, "400": 1}
    assert values[("plait_time_to_first_token_seconds_count",)] == 0


@pytest.fixture
def narrow(small_model, tmp_path):
    """A server whose cache holds little more than one document."""
    settings = server_settings(files_dir=str(tmp_path), max_batch_calls=1)
    with (
        Engine(small_model, max_pages=500, check_integrity=True) as engine,
        serve_app(create_app(engine, settings)) as address,
    ):
        yield address, engine


def test_lines_with_a_shared_prefix_run_together(narrow) -> None:
    """Documents that take turns in the file are computed once, though the cache cannot hold them all."""
    address, engine = narrow
    documents = [" ".join(f"{word}{n}" for n in range(110)) for word in ("a", "b", "c")]
    bodies = [ASK | {"prompt": f"{text} question {n}", "max_tokens": 1} for n in range(6) for text in documents]
    tokens = len(engine.client.tokenizer.encode([(documents[0], False)]))
    assert 200 < tokens < 400
    before = engine.client.status().computed_tokens
    url = f"{address}/v1/batches/{create_batch(address, bodies)}"
    assert wait_until(lambda: httpx.get(url).json()["status"] == "completed")
    assert httpx.get(url).json()["request_counts"]["completed"] == 18
    computed = engine.client.status().computed_tokens - before
    assert computed < 4 * tokens, "18 lines over 3 documents"
