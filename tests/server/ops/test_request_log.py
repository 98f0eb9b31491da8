"""The request log: one line per request, without prompts unless the operator asks for them."""

from __future__ import annotations

import json
import logging
import re

import httpx
from waiting import wait_until

from plait.runtime.server.in_flight import RequestRecord
from plait.runtime.server.ops.request_log import _JsonLines, request_log_fields

REQUESTS = "plait.requests"
BODY = {"model": "default", "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}


def lines(caplog):
    """The records of requests; other loggers may be on as well."""
    return [record for record in list(caplog.records) if record.name == REQUESTS]


def test_request_is_one_log_line_without_its_prompt(serve, caplog) -> None:
    address, _ = serve()
    caplog.set_level(logging.INFO, REQUESTS)
    prompt = "A secret that no log may hold"
    headers = {"x-request-id": b"theirs\xa0" + b"x" * 500, "traceparent": f"00-{'a1' * 16}-{'b2' * 8}-01".encode()}
    response = httpx.post(f"{address}/v1/completions", json={**BODY, "prompt": prompt}, headers=headers, timeout=60)
    httpx.get(f"{address}/health", timeout=60)
    httpx.post(f"{address}/v1/completions", content=b"{", headers={"content-type": "application/json"}, timeout=60)
    assert wait_until(lambda: len(lines(caplog)) == 2)
    good, bad = (json.loads(_JsonLines().format(record)) for record in lines(caplog))
    assert good["request_id"] == response.headers["x-request-id"]
    assert good["client_request_id"] == ("theirs" + "x" * 500)[:128] and good["trace_id"] == "a1" * 16
    assert (good["method"], good["route"], good["status"], good["level"]) == ("POST", "/v1/completions", 200, "info")
    assert good["completion_tokens"] == 4 and good["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert 0 <= good["queue_s"] <= good["ttft_s"] <= good["wall_s"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", good["time"])
    assert (bad["status"], bad["error"]) == (400, "invalid_json")
    assert "secret" not in json.dumps([good, bad])


def test_log_prompts_adds_the_beginning_of_the_body(serve, caplog) -> None:
    address, _ = serve(log_prompts=True)
    caplog.set_level(logging.INFO, REQUESTS)
    httpx.post(f"{address}/v1/completions", json={**BODY, "prompt": "word " * 2000, "n": 0}, timeout=60)
    assert wait_until(lambda: lines(caplog))
    body = json.loads(_JsonLines().format(lines(caplog)[0]))["body"]
    assert "word word" in body and len(body) == 4096


def test_the_text_log_has_the_path_of_a_request_without_a_route(serve, caplog) -> None:
    address, _ = serve()
    caplog.set_level(logging.INFO, REQUESTS)
    httpx.get(f"{address}/v1/chat/completion%0Anew line")
    httpx.post(f"{address}/v1/completions", json=BODY)
    assert wait_until(lambda: len(lines(caplog)) == 2)
    missing, found = (record.getMessage() for record in lines(caplog))
    assert missing == "GET /v1/chat/completion\\nnew line 404" and found == "POST /v1/completions 200"


def test_the_line_names_the_adapter_that_computed_a_request() -> None:
    record = RequestRecord(method="POST", path="/generate", request_id="req-1", adapter="sql")
    assert request_log_fields(record)["adapter"] == "sql"
    record.adapter = ""
    assert "adapter" not in request_log_fields(record)
