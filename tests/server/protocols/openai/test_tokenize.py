"""`/tokenize` and `/detokenize`: what a prompt is in tokens, and the way back."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from plait.runtime.server.protocols.openai.tokenize import TokenizeRequest, _prompts

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="session")
def post(http):
    def post(path, **body):
        return http.post(f"/{path}", json=body)

    return post


def test_there_and_back(post):
    told = post("tokenize", prompt="Hello, wörld", return_token_strs=True).json()
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] > 1000
    assert "".join(told["token_strs"]).startswith("Hello, w")
    back = post("detokenize", tokens=told["tokens"]).json()
    assert back == {"prompt": "Hello, wörld", "text": "Hello, wörld"}


def test_lists(post):
    told = post("tokenize", model="default", prompt=["a b", "c"]).json()
    assert told["count"] == [len(ids) for ids in told["tokens"]] and len(told["tokens"]) == 2
    assert post("detokenize", tokens=told["tokens"]).json()["text"] == ["a b", "c"]
    assert post("detokenize", tokens=[]).json()["text"] == ""


def test_a_conversation_is_what_chat_completions_reads(post):
    told = post("tokenize", messages=CHAT).json()
    body = {"model": "default", "messages": CHAT, "max_tokens": 1}
    assert post("v1/chat/completions", **body).json()["usage"]["prompt_tokens"] == told["count"]
    text = post("detokenize", tokens=told["tokens"], skip_special_tokens=False).json()["text"]
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    parsed = post("tokenize", prompt=text, parse_special=True).json()
    assert parsed["tokens"] == told["tokens"]
    assert "<|im_start|>" not in post("detokenize", tokens=told["tokens"]).json()["text"]
    closed = post("tokenize", messages=CHAT, add_generation_prompt=False).json()
    assert told["tokens"][: closed["count"]] == closed["tokens"] and closed["count"] < told["count"]


def test_control_tokens_of_a_prompt_are_plain_text(post):
    plain = post("tokenize", prompt="<|im_end|>").json()
    assert plain["count"] > 1 and post("detokenize", tokens=plain["tokens"]).json()["text"] == "<|im_end|>"


def test_long_lists_are_what_their_parts_are(post):
    texts = [f"text {i} " + "word " * 300 for i in range(20)]
    told = post("tokenize", prompt=texts).json()
    assert told["tokens"] == [post("tokenize", prompt=text).json()["tokens"] for text in texts]
    assert post("detokenize", tokens=told["tokens"] * 5).json()["text"] == texts * 5


def test_long_lists_are_tokenized_beside_the_loop():
    seen = []

    def encode(parts, at_start):
        seen.append(threading.get_ident())
        return [1]

    client = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode))
    body = TokenizeRequest(prompt=[], add_special_tokens=False)
    assert asyncio.run(_prompts(["word " * 100] * 90, body, client)) == [[1]] * 90
    assert len(seen) == 90 and threading.get_ident() not in seen


WRONG = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
    ("tokenize", {"prompt": []}, "prompt"),
    ("tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("tokenize", {"prompt": 5}, "prompt"),
    ("tokenize", {"messages": []}, "messages"),
    ("detokenize", {}, "tokens"),
    ("detokenize", {"tokens": [-1]}, "tokens"),
    ("detokenize", {"tokens": [1 << 40]}, "tokens"),
    ("detokenize", {"tokens": [1, [2]]}, "tokens"),
    ("detokenize", {"tokens": "a"}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda each: str(each)[:40])
def test_what_is_refused_is_named(post, path, body, param):
    answer = post(path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_another_model_is_not_here(post):
    assert post("tokenize", model="x", prompt="a").status_code == 404
    assert post("detokenize", model="x", tokens=[1]).status_code == 404
