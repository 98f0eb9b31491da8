"""`/tokenize` and `/detokenize`."""

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


def test_tokenize_and_detokenize(post):
    answer = post("tokenize", prompt="Hello, wörld", return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] > 1000
    assert "".join(answer["token_strs"]).startswith("Hello, w")
    back = post("detokenize", tokens=answer["tokens"]).json()
    assert back == {"prompt": "Hello, wörld", "text": "Hello, wörld"}


def test_lists(post):
    answer = post("tokenize", model="default", prompt=["a b", "c"]).json()
    assert answer["count"] == [len(ids) for ids in answer["tokens"]] and len(answer["tokens"]) == 2
    assert post("detokenize", tokens=answer["tokens"]).json()["text"] == ["a b", "c"]
    assert post("detokenize", tokens=[]).json()["text"] == ""


def test_conversation_has_the_tokens_of_a_chat_completion(post):
    answer = post("tokenize", messages=CHAT).json()
    body = {"model": "default", "messages": CHAT, "max_tokens": 1}
    assert post("v1/chat/completions", **body).json()["usage"]["prompt_tokens"] == answer["count"]
    text = post("detokenize", tokens=answer["tokens"], skip_special_tokens=False).json()["text"]
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    parsed = post("tokenize", prompt=text, parse_special=True).json()
    assert parsed["tokens"] == answer["tokens"]
    assert "<|im_start|>" not in post("detokenize", tokens=answer["tokens"]).json()["text"]
    closed = post("tokenize", messages=CHAT, add_generation_prompt=False).json()
    assert answer["tokens"][: closed["count"]] == closed["tokens"] and closed["count"] < answer["count"]


def test_control_tokens_of_a_prompt_are_those_of_completions(post):
    assert post("tokenize", prompt="<|im_end|>").json()["count"] == 1
    plain = post("tokenize", prompt="<|im_end|>", parse_special=False).json()
    assert plain["count"] > 1 and post("detokenize", tokens=plain["tokens"]).json()["text"] == "<|im_end|>"


def test_long_lists_equal_their_parts(post):
    texts = [f"text {i} " + "word " * 300 for i in range(20)]
    answer = post("tokenize", prompt=texts).json()
    assert answer["tokens"] == [post("tokenize", prompt=text).json()["tokens"] for text in texts]
    assert post("detokenize", tokens=answer["tokens"] * 5).json()["text"] == texts * 5


def test_long_lists_are_tokenized_in_a_thread():
    seen = []

    def encode(parts, at_start):
        seen.append(threading.get_ident())
        return [1]

    client = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode))
    body = TokenizeRequest(prompt=[], add_special_tokens=False)
    assert asyncio.run(_prompts(["word " * 100] * 90, body, client, False)) == [[1]] * 90
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


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_errors_name_the_field(post, path, body, param):
    answer = post(path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_unknown_model(post):
    assert post("tokenize", model="x", prompt="a").status_code == 404
    assert post("detokenize", model="x", tokens=[1]).status_code == 404
