"""/metrics: what is counted, and that labels have few values."""

from __future__ import annotations

import time

import httpx
from prometheus_scrape import scrape

BODY = {"model": "default", "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
MODEL = {"model_name": "SmolLM2-135M-Instruct.Q4_1"}


def test_requests_and_tokens_are_counted(serve) -> None:
    address, _ = serve()
    before = scrape(address)
    for _ in range(2):
        assert httpx.post(f"{address}/v1/completions", json=BODY, timeout=60).status_code == 200
    constrained = {**BODY, "regex": " (constantinople|kathmandu)", "max_tokens": 30}
    assert httpx.post(f"{address}/v1/completions", json=constrained, timeout=60).status_code == 200
    assert httpx.post(f"{address}/v1/completions", json={**BODY, "n": 0}, timeout=60).status_code == 400
    assert httpx.post(f"{address}/v1/unknown-{time.time()}", json={}, timeout=60).status_code == 404
    after = scrape(address)

    def increase(name, **labels):
        key = (name, *sorted(labels.items()))
        return after[key] - before.get(key, 0)

    assert increase("plait_request_seconds_count", route="/v1/completions", status="200") == 3
    assert increase("plait_request_seconds_count", route="/v1/completions", status="400") == 1
    assert increase("plait_request_seconds_count", route="other", status="404") == 1
    assert increase("plait_time_to_first_token_seconds_count") == increase("plait_queue_seconds_count") == 3
    assert increase("plait_grammar_compile_seconds_count") == 1
    assert increase("plait_rejections_total", reason="invalid_request") == 2
    sampled, forced = increase("plait_sampled_tokens_total"), increase("plait_forced_tokens_total")
    assert sampled >= 8 and forced >= 1
    assert increase("vllm:generation_tokens_total", **MODEL) == sampled + forced
    assert increase("plait_inter_token_seconds_count") == sampled + forced - 3
    prompt = increase("plait_prompt_tokens_total")
    assert prompt == increase("vllm:prefix_cache_queries_total", **MODEL) > 0
    assert 0 < increase("plait_prefix_hit_tokens_total") < prompt
    assert increase("plait_computed_tokens_total") >= prompt - increase("plait_prefix_hit_tokens_total")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert after[f"vllm:{name}", ("model_name", MODEL["model_name"])] == 0
    assert after["plait_runtime_up",] == 1 and after["plait_requests_in_flight",] == 0


def test_paths_of_clients_do_not_become_labels(serve) -> None:
    address, state = serve()
    with httpx.Client(base_url=address, timeout=60) as client:
        for number in range(50):
            client.get(f"/v1/models/{number}")
            client.get(f"/{number}", headers={"x-request-id": str(number)})
            client.request("PROPFIND", f"/health?{number}")
    routes = {route for route, _ in state.metrics.requests.counts}
    assert routes == {"/v1/models/{model:path}", "other", "/health"}
