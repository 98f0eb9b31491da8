"""`plait serve --models` with two real models and small ones of random weights: every protocol, and faults."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import time

import httpx
import pytest
from prometheus_scrape import scrape
from served_models import CAPITAL, GREEDY, Models
from waiting import wait_until


@pytest.fixture(scope="module")
def served(folder):
    """Room for all models."""
    models = """
smol:
gemma: gemma3-270m
tiny: {model: tiny.gguf, kv-memory-gb: 0.25}
short: {model: tiny.gguf, context-length: 64, max-batch-rows: 1, kv-memory-gb: 0.01}
damaged: damaged.gguf
gone: gone.gguf
"""
    served = Models(folder, models, "--keep", 6, "--max-queue", 8, "--log-format", "text")
    try:
        yield served
        assert served.end() == 0
    finally:
        served.close()


def test_models_are_listed_and_nothing_runs_before_the_first_request(served) -> None:
    assert served.statuses() == dict.fromkeys(("smol", "gemma", "tiny", "short", "damaged", "gone"), "unloaded")
    assert served.runtimes() == [] and served.http.get("/ready").status_code == 200
    assert [model["name"] for model in served.http.get("/api/ps").json()["models"]] == []
    tags = {model["name"]: model["details"]["family"] for model in served.http.get("/api/tags").json()["models"]}
    assert tags == {
        **{"smol:latest": "llama", "gemma:latest": "gemma3", "tiny:latest": "llama", "short:latest": "llama"},
        **{"damaged:latest": "unknown", "gone:latest": "llama"},
    }


def test_each_model_answers_with_its_own_text(served) -> None:
    """Three that are started at once, by several requests each, streams among them."""
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = {name: [pool.submit(served.text, name) for _ in range(2)] for name in ("smol", "gemma", "tiny")}
        with served.http.stream(
            "POST", "/v1/completions", json={**GREEDY, "model": "gemma", "prompt": CAPITAL, "stream": True}
        ) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        texts = {name: {answer.result() for answer in answers} for name, answers in asked.items()}
    assert {len(of_model) for of_model in texts.values()} == {1} and len(set.union(*texts.values())) == 3
    assert " Paris" in min(texts["smol"]) and served.text("gemma", "One, two,").startswith(" three")
    assert "".join(event["choices"][0]["text"] for event in events) == min(texts["gemma"])
    assert served.loaded() == {"smol", "gemma", "tiny"} and len(served.runtimes()) == 3
    entries = {model["id"]: model for model in served.http.get("/v1/models").json()["data"]}
    assert entries["smol"]["max_model_len"] == 8192 and entries["tiny"]["max_model_len"] == 1 << 20
    assert entries["short"]["max_model_len"] is None


PROGRAM = [{"text": CAPITAL}, {"gen": {"name": "x", "max_tokens": 4, "temperature": 0}}]
TURNS = [{"role": "user", "content": "Hi"}]
ZERO = {"temperature": 0, "num_predict": 4}
REQUESTS = {  # path -> the request, and its text in the answer
    "/v1/completions": ({"prompt": CAPITAL, **GREEDY}, lambda body: body["choices"][0]["text"]),
    "/generate": (
        {"text": CAPITAL, "sampling_params": {"max_new_tokens": 4, "temperature": 0}},
        lambda body: body["text"],
    ),
    "/v1/programs": ({"program": PROGRAM}, lambda body: body["variables"]["x"]),
    "/api/generate": (
        {"prompt": CAPITAL, "raw": True, "stream": False, "options": ZERO},
        lambda body: body["response"],
    ),
    "/v1/chat/completions": (
        {"messages": TURNS, **GREEDY},
        lambda body: body["choices"][0]["message"]["content"],
    ),
    "/v1/responses": (
        {"input": "Hi", "temperature": 0, "max_output_tokens": 4},
        lambda body: body["output"][0]["content"][0]["text"],
    ),
    "/v1/messages": ({"messages": TURNS, **GREEDY}, lambda body: body["content"][0]["text"]),
    "/api/chat": ({"messages": TURNS, "stream": False, "options": ZERO}, lambda body: body["message"]["content"]),
}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_protocol_goes_to_the_model_it_names(served, path) -> None:
    body, text_of = REQUESTS[path]
    texts = {}
    for name in ("smol", "tiny", "default", None):
        answer = served.ask(path, **body, **({} if name is None else {"model": name}))
        if name is None and path not in ("/generate", "/v1/programs"):
            assert answer.status_code == 400  # these protocols require a model
            continue
        assert answer.status_code == 200, answer.text
        texts[name] = text_of(answer.json())
        assert answer.json().get("model", "smol") in ("smol", "tiny", "default")
    assert texts["smol"] != texts["tiny"] and texts["default"] == texts["smol"] == texts.get(None, texts["smol"])
    is_plain = path in ("/v1/completions", "/generate", "/v1/programs", "/api/generate")
    reference = REQUESTS["/v1/completions" if is_plain else "/v1/chat/completions"]
    expected = served.ask("/v1/completions" if is_plain else "/v1/chat/completions", model="tiny", **reference[0])
    assert texts["tiny"] == reference[1](expected.json())
    unknown = served.ask(path, **body, model="tinny")
    assert unknown.status_code == 404 and "did you mean 'tiny'?" in unknown.text


def test_other_endpoints_go_to_the_model_they_name(served) -> None:
    vectors = served.ask("/v1/embeddings", model="tiny", input="a cat").json()
    assert vectors["model"] == "tiny" and len(vectors["data"][0]["embedding"]) == 64
    assert len(served.ask("/api/embed", model="tiny", input="a cat").json()["embeddings"][0]) == 64
    refused = served.ask("/v1/embeddings", model="smol", input="a cat")
    assert refused.status_code == 400 and "the model 'smol' cannot compute embeddings" in refused.text
    counts = {name: served.ask("/tokenize", model=name, prompt=CAPITAL).json() for name in ("smol", "gemma")}
    assert counts["smol"]["tokens"] != counts["gemma"]["tokens"]
    text = served.ask("/detokenize", model="gemma", tokens=counts["gemma"]["tokens"]).json()["text"]
    assert text.endswith(CAPITAL)
    tokens = served.ask("/v1/messages/count_tokens", model="tiny", messages=TURNS)
    assert tokens.json()["input_tokens"] > 3
    infos = {name: served.http.get("/get_model_info", params={"model": name}).json() for name in ("smol", "gemma")}
    assert infos["gemma"]["vocab_size"] > infos["smol"]["vocab_size"]
    assert served.http.get("/server_info?model=tiny").json()["served_model_name"] == "tiny"
    assert served.http.get("/get_model_info?model=x").status_code == 404
    assert served.http.get("/health_generate").status_code == 200
    show = served.ask("/api/show", model="tiny:latest").json()
    assert show["capabilities"] == ["completion", "tools", "embedding"]
    assert served.http.get("/v1/models/gemma").json()["status"] == "loaded"


def test_a_model_has_its_own_settings(served) -> None:
    long = served.ask("/v1/completions", model="short", prompt="a " * 70, max_tokens=2)
    assert long.status_code == 400 and "maximum context length is 64 tokens" in long.text
    assert len(served.text("tiny", "a " * 70)) > 0


def test_the_full_queue_of_a_model_does_not_stop_others(served) -> None:
    full = {"model": "short", "prompt": "a", "max_tokens": 60, "ignore_eos": True, "n": 9}
    with concurrent.futures.ThreadPoolExecutor(24) as pool:  # of each nine calls, one runs and eight may wait
        answers = [pool.submit(served.ask, "/v1/completions", **full) for _ in range(20)]
        others = [pool.submit(served.text, "tiny", max_tokens=1) for _ in range(4)]
        assert all(other.result() is not None for other in others)
    results = [(answer.result().status_code, answer.result().text) for answer in answers]
    assert sum(status == 200 for status, _ in results) >= 1
    refused = [text for status, text in results if status != 200]
    assert refused and all('"queue_full"' in text for text in refused)


def test_damaged_and_missing_models_fail_alone(served) -> None:
    (served.folder / "gone.gguf").unlink()
    with served.stream("tiny") as lines:
        for name, cause in (("damaged", "damaged.gguf"), ("gone", "there is no model at")):
            began = time.monotonic()
            for _ in range(2):
                failed = served.ask("/v1/chat/completions", model=name, messages=TURNS)
                error = failed.json()["error"]
                assert failed.status_code == 503 and error["code"] == "model_start_failed" and cause in error["message"]
                assert 1 <= int(failed.headers["retry-after"]) <= 5
            if time.monotonic() - began < 5:  # otherwise the pause has passed on a busy machine
                assert served.of(name)["status"] == "failed" and cause in served.of(name)["error"]
                assert sum(f"the model {name} is started" in line for line in served.lines) == 1
        assert served.text("smol").startswith(" Paris")
        assert next(line for line in lines if line)
    stream = served.ask("/v1/chat/completions", model="damaged", messages=TURNS, stream=True)
    assert stream.status_code == 503 and "event-stream" not in stream.headers["content-type"]
    assert served.ask("/api/chat", model="damaged", messages=TURNS).json()["error"].startswith("the model 'damaged'")
    anthropic = served.ask("/v1/messages", model="damaged", messages=TURNS, max_tokens=2).json()
    assert anthropic["error"]["type"] == "overloaded_error" and "could not be started" in anthropic["error"]["message"]


def test_a_model_that_is_back_starts_after_the_pause(served) -> None:
    shutil.copy(served.folder / "tiny.gguf", served.folder / "gone.gguf")
    answer = served.ask("/tokenize", model="gone", prompt="a")
    for _ in range(10):
        if answer.status_code == 200:
            return
        time.sleep(int(answer.headers["retry-after"]))
        answer = served.ask("/tokenize", model="gone", prompt="a")
    raise AssertionError(answer.text)


def test_a_killed_engine_is_replaced_while_another_answers(served) -> None:
    """A request that was lost is run again; streams of other models go on."""
    expected = served.text("smol", max_tokens=8)
    with served.stream("tiny") as lines, served.stream("smol") as lost:
        os.kill(served.pid("smol"), signal.SIGKILL)
        assert json.loads([line for line in lost if line][-1][6:])["error"]["code"] == "runtime_gone"
        assert served.text("smol", max_tokens=8) == expected
        assert served.text("tiny", max_tokens=2) and next(line for line in lines if line)
    assert served.of("smol")["restarts"] == 1 and served.of("tiny")["restarts"] == 0
    assert served.http.get("/ready").status_code == 200


def test_metrics_and_status_have_every_model(served) -> None:
    metrics = scrape(served.address)
    smol, tiny, damaged = (("model", name) for name in ("smol", "tiny", "damaged"))
    assert metrics["plait_model_loaded", smol] == 1 and metrics["plait_model_loaded", damaged] == 0
    assert metrics["plait_model_failed_starts_total", damaged] >= 1 and metrics["plait_model_starts_total", smol] == 1
    assert metrics["plait_runtime_restarts_total", smol] == 1 and metrics["plait_runtime_up", tiny] == 1
    assert ("plait_runtime_up", damaged) not in metrics
    assert metrics["vllm:prompt_tokens_total", ("model_name", "tiny")] > 0
    labels = (("model", "tiny"), ("route", "/v1/embeddings"), ("status", "200"))
    assert metrics["plait_request_seconds_count", *labels] == 1
    status = served.http.get("/status").json()
    assert [model["name"] for model in status["models"]] == list(served.statuses())
    assert status["runtime"]["total_pages"] == sum(
        model["runtime"]["total_pages"] for model in status["models"] if model["runtime"] is not None
    )


def test_keys_are_kept_apart_in_every_model(served) -> None:
    prompt = "A text that only alice has sent so far, to both models."
    bob = {"authorization": "Bearer b-key"}

    def cached(model: str, **options) -> int:
        body = {"model": model, "prompt": prompt, **GREEDY}
        answer = served.http.post("/v1/completions", json=body, **options).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    for model in ("smol", "tiny"):
        assert cached(model) == 0 and cached(model) > 5 and cached(model, headers=bob) == 0
    assert served.http.post("/flush_cache", json={}, headers=bob).status_code == 200
    assert [cached(model) > 5 for model in ("smol", "tiny")] == [True, True]
    assert served.http.post("/flush_cache", json={}).status_code == 200
    assert [cached(model) for model in ("smol", "tiny")] == [0, 0]
    assert httpx.post(f"{served.address}/v1/completions", json={"model": "smol"}, timeout=60).status_code == 401


def test_a_request_is_aborted_in_whichever_model_it_runs(served) -> None:
    body = {
        "model": "tiny",
        "text": "One",
        "rid": "r",
        "sampling_params": {"max_new_tokens": 900_000, "ignore_eos": True},
    }
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.ask, "/generate", **body)
        assert wait_until(lambda: served.ask("/abort_request", rid="r").json()["aborted"] == 1)
        assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
