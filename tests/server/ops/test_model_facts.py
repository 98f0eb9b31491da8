"""What evaluation harnesses read beside completions: facts of the model, and nothing of other requests."""

from __future__ import annotations

import httpx
import pytest

from plait.runtime.server.http.api_keys import digest

SECRET = "a prompt that nobody else may see"


@pytest.fixture
def http(serve):
    address, _ = serve(model_name="smol", aliases=("gpt-4",))
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


def test_a_remote_tokenizer_of_lm_evaluation_harness_works(http) -> None:
    """It reads the tokens' texts, finds their ids with /tokenize, and renders the template itself."""
    info = http.get("/tokenizer_info").json()
    ids = {}
    for name in ("bos_token", "eos_token"):
        body = {"prompt": info[name], "add_special_tokens": False}
        ids[name] = http.post("/tokenize", json=body).json()["tokens"]
    assert (info["eos_token"], ids["eos_token"], ids["bos_token"]) == ("<|im_end|>", [2], [1])
    assert "im_start" in info["chat_template"] and info["pad_token"] is None
    model = http.get("/v1/models").json()["data"][0]
    assert info["model_max_length"] == model["max_model_len"] > 1000 and info["vocab_size"] == 49152
    text = {"prompt": "The capital of France is", "add_special_tokens": False}
    prompt = http.post("/tokenize", json=text).json()["tokens"]
    body = {"model": "gpt-4", "prompt": [prompt, prompt], "echo": True, "logprobs": 1, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body | {"temperature": 0, "seed": 1234}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["The capital of France is Paris"] * 2
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(prompt) + 1


def test_the_properties_of_llama_cpp_have_nothing_of_requests(http) -> None:
    before = http.get("/props").json()
    assert http.post("/v1/completions", json={"model": "smol", "prompt": SECRET, "max_tokens": 1}).status_code == 200
    after = http.get("/props", params={"model": "gpt-4"})
    assert after.json() == before and SECRET not in after.text
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert before["default_generation_settings"] == {"n_ctx": limit} and before["model_alias"] == "smol"
    assert before["eos_token"] == "<|im_end|>" and before["total_slots"] > 1
    assert before["build_info"].startswith("plait ")
    assert http.get("/props", params={"model": "other"}).status_code == 404
    assert http.post("/props", json={}).status_code == 405


def test_they_need_a_key(serve) -> None:
    address, _ = serve(api_keys={"ann": digest(b"ann")})
    for path in ("/tokenizer_info", "/props"):
        assert httpx.get(address + path, timeout=60).status_code == 401
        assert httpx.get(address + path, headers={"authorization": "Bearer ann"}, timeout=60).status_code == 200
