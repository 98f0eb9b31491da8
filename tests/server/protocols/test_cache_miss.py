"""Why prompts were computed: the report of every protocol, the metric, and the line that changes with each request."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from prometheus_scrape import scrape

from plait.runtime.server.http.api_keys import digest

LONG = "The prefix of this prompt is the same in both requests, and long enough to be worth a cache. " * 4
TEXTS = (LONG + "One is about cats.", LONG + "One is about dogs.")
WANTED = {"x-plait-cache-miss": "1"}


def chat(text):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


REQUESTS = {
    "/v1/chat/completions": chat,
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
    "/v1/messages": chat,
    "/api/chat": lambda text: {"messages": chat(text)["messages"], "options": {"num_predict": 1}},
    "/api/generate": lambda text: {"prompt": text, "options": {"num_predict": 1}},
    "/generate": lambda text: {"text": text, "sampling_params": {"max_new_tokens": 1}},
    "/v1/programs": lambda text: {"program": [{"text": text}, {"gen": {"max_tokens": 1}}]},
}


@pytest.fixture
def http(serve, engine):
    engine.client.flush_cache()
    keys = {name: digest(name.encode()) for name in ("ann", "bob")}
    address, _ = serve(api_keys=keys, open_metrics=True)
    with httpx.Client(base_url=address, timeout=60, headers={"authorization": "Bearer ann"}) as client:
        yield client


def reports_in(value) -> list[dict]:
    """All fields `cache_miss` within JSON."""
    if isinstance(value, list):
        return [found for item in value for found in reports_in(item)]
    if not isinstance(value, dict):
        return []
    own = [value["cache_miss"]] if "cache_miss" in value else []
    return own + [found for item in value.values() for found in reports_in(item)]


def ask(http, path, text, stream=False, headers=WANTED) -> list[dict]:
    body = REQUESTS[path](text) | {"model": "default", "stream": stream}
    answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not stream:
        return reports_in(answer.json())
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return reports_in([json.loads(line) for line in lines if line.startswith("{")])


@pytest.mark.parametrize("path", REQUESTS)
def test_answers_say_where_the_prompt_parted(http, path) -> None:
    cats, dogs = TEXTS
    assert ask(http, path, cats, headers={}) == ask(http, path, cats, headers={"x-plait-cache-miss": "0"}) == []
    (report,) = ask(http, path, dogs, stream=True)
    assert report["reason"] == "diverged" and report["position"] > 60
    (again,) = ask(http, path, dogs)
    assert again["reason"] == "outputs" and again["position"] > report["position"]
    if path == "/v1/programs":
        assert report.keys() == {"position", "reason"}
        return
    assert report["before"].endswith(" about") and report["after"].startswith(" dogs")
    assert "cat" not in json.dumps([report, again])


def test_what_another_key_or_salt_has_cached_does_not_count(http) -> None:
    cats, dogs = TEXTS
    ask(http, "/v1/completions", cats)
    bob = {"authorization": "Bearer bob", **WANTED}
    (report,) = ask(http, "/v1/completions", dogs, headers=bob)
    assert (report["position"], report["reason"], report["before"]) == (0, "new_prefix", "")
    assert report["after"].startswith("The prefix of this")
    salted = {"model": "default", "prompt": dogs, "max_tokens": 1, "cache_salt": "s"}
    assert reports_in(http.post("/v1/completions", json=salted, headers=WANTED).json())[0]["reason"] == "new_prefix"
    (longer,) = ask(http, "/v1/completions", cats + " They purr.", headers=WANTED)
    assert longer["reason"] in ("extended", "diverged") and "They" in longer["after"]


def test_the_answers_of_one_prompt(http) -> None:
    body = {"model": "default", "prompt": TEXTS[0], "max_tokens": 1}
    first = http.post("/v1/completions", json=body | {"n": 2}, headers=WANTED).json()
    reasons = [choice["cache_miss"]["reason"] for choice in first["choices"]]
    assert reasons[0] == "new_prefix" and reasons[1] in ("outputs", "new_prefix", "extended")


def test_the_metric_counts_computed_tokens_and_nothing_is_logged(http, caplog) -> None:
    cats, dogs = TEXTS
    with caplog.at_level(logging.INFO):
        answers = [
            http.post("/v1/completions", json={"model": "default", "prompt": text, "max_tokens": 1}, headers=WANTED)
            for text in (cats, dogs, dogs)
        ]
    metrics = scrape(str(http.base_url).rstrip("/"))
    names = ("new_prefix", "diverged", "outputs", "evicted", "extended")
    counted = [metrics.get(("plait_cache_miss_tokens_total", ("reason", name)), 0) for name in names]
    usages = [answer.json()["usage"] for answer in answers]
    computed = [usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert counted == [*computed, 0, 0] and computed[2] == 1
    assert "dogs" not in caplog.text and "cache_miss" not in caplog.text


BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cch={};"


def claude(http, *blocks, **fields):
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in blocks]
    body = chat("hi") | {"model": "default", "system": system} | fields
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_billing_line_of_claude_code_is_left_out(http) -> None:
    plain = claude(http, LONG)
    assert "warnings" not in plain
    for number in range(2):
        answer = claude(http, BILLING.format(number), LONG)
        usage = answer["usage"]
        assert usage["input_tokens"] == 1 and usage["cache_read_input_tokens"] == plain["usage"]["input_tokens"] - 1
        (warning,) = answer["warnings"]
        assert warning.startswith("'system[0]' has no effect: it is only a line of x-anthropic-billing-header:")
    counted = http.post("/v1/messages/count_tokens", json=chat("hi") | {"model": "default", "system": [
        {"type": "text", "text": BILLING}, {"type": "text", "text": LONG}], "max_tokens": None} ).json()  # fmt: skip
    assert counted["input_tokens"] == plain["usage"]["input_tokens"] + plain["usage"]["cache_read_input_tokens"]
    (text,) = claude(http, LONG, system=BILLING.format(1))["warnings"]
    assert "billing" in text


NOT_BILLING = [BILLING + "\nBe brief.", "Be brief. " + BILLING, " " + BILLING, "x-anthropic-billing: 1"]


@pytest.mark.parametrize("text", NOT_BILLING)
def test_other_blocks_stay(http, text) -> None:
    answer = claude(http, text, LONG)
    assert "warnings" not in answer
    assert answer["usage"]["input_tokens"] > claude(http, LONG)["usage"]["cache_read_input_tokens"] // 2
