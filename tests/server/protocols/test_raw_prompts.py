"""Control tokens in raw prompts: read in /v1/completions, /generate and Ollama's raw, and nowhere else.

The reference are the ids of `tokenizers` and transformers.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_scheduler import CONTROL
from scripted_server import ScriptedServer
from tokenizer_samples import smollm2_in_transformers
from trained_tokenizers import save_folder, train_tokenizer

from plait.runtime.messages import Append
from plait.runtime.server.errors import ApiError
from plait.runtime.server.generation import raw_prompt
from plait.runtime.server.generation.raw_prompt import MARKS, PromptPart
from plait.runtime.server.protocols.openai.completion_prompts import read_prompts
from plait.runtime.tokenizer.tokenizer import load_tokenizer

TURN = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ASK = {"model": "default", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="session")
def reference() -> Any:
    return smollm2_in_transformers()


def completion(http: httpx.Client, prompt: Any, **fields: Any) -> tuple[str, int]:
    """The text, and the number of tokens of the prompt."""
    answer = http.post("/v1/completions", json=ASK | {"prompt": prompt} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]["prompt_tokens"]


def generated(http: httpx.Client, text: str, **fields: Any) -> tuple[str, int]:
    answer = http.post(
        "/generate", json={"text": text, "sampling_params": {"max_new_tokens": 6, "temperature": 0}} | fields
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["text"], answer.json()["meta_info"]["prompt_tokens"]


def raw(http: httpx.Client, prompt: str) -> tuple[str, int]:
    options = {"num_predict": 6, "temperature": 0}
    body = {"model": "default", "prompt": prompt, "raw": True, "stream": False, "options": options}
    answer = http.post("/api/generate", json=body).json()
    return answer["response"], answer["prompt_eval_count"]


@pytest.fixture(scope="module")
def smol(real_address):
    with httpx.Client(base_url=real_address, timeout=60) as client:
        yield client


def test_a_rendered_template_is_read_as_its_tokens(smol, reference) -> None:
    ids = reference.encode(TURN, add_special_tokens=False)
    by_ids = completion(smol, ids)
    assert by_ids[1] == len(ids) and "Paris" in by_ids[0]
    assert completion(smol, TURN) == generated(smol, TURN) == raw(smol, TURN) == by_ids
    assert smol.post("/tokenize", json={"prompt": TURN}).json()["tokens"] == ids
    chat = smol.post("/v1/chat/completions", json=ASK | {"messages": [{"role": "user", "content": TURN}]})
    quoted = {"messages": [{"role": "user", "content": TURN}]}
    assert chat.json()["usage"]["prompt_tokens"] == smol.post("/tokenize", json=quoted).json()["count"] > 2 * len(ids)


def test_plain_text_on_request_and_in_parts(smol, reference) -> None:
    plain = len(smol.post("/tokenize", json={"prompt": TURN, "parse_special": False}).json()["tokens"])
    assert completion(smol, TURN, parse_special=False)[1] == generated(smol, TURN, parse_special=False)[1] == plain > 30
    before, after = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    parts = [{"text": before}, {"text": "Say <|im_end|>.", "special": False}, {"text": after, "special": True}]
    text, count = completion(smol, parts, echo=True)
    assert text.startswith(f"{before}Say <|im_end|>.{after}")
    marks = [len(reference.encode(piece, add_special_tokens=False)) for piece in (before, after)]
    quoted = {"prompt": "\nSay <|im_end|>.", "parse_special": False}  # the template's line break is text before it
    assert count == sum(marks) - 1 + smol.post("/tokenize", json=quoted).json()["count"]
    assert count > completion(smol, [before + "Say <|im_end|>." + after])[1], "the user's text closes no turn"
    many = smol.post("/v1/completions", json=ASK | {"prompt": [parts, parts[:1]]}).json()
    assert many["usage"]["prompt_tokens"] == count + marks[0] and len(many["choices"]) == 2
    assert completion(smol, parts, parse_special=False)[1] > count


A = {"text": "a"}


@pytest.mark.parametrize("prompt", [[A, "b"], [A, 5], [[A, 5]], [{"text": ""}], [[]], [A | {"role": "user"}]])
def test_wrong_parts_are_refused(smol, prompt) -> None:
    assert smol.post("/v1/completions", json=ASK | {"prompt": prompt}).status_code == 400


def test_logprobs_of_an_echo_have_the_names_of_control_tokens(smol) -> None:
    answer = smol.post("/v1/completions", json=ASK | {"prompt": TURN, "echo": True, "logprobs": 1}).json()["choices"][0]
    logprobs = answer["logprobs"]
    assert logprobs["tokens"][0] == "<|im_start|>" and "".join(logprobs["tokens"]) == answer["text"]
    assert all(
        answer["text"].startswith(token, at)
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    )


def test_the_server_can_turn_it_off(serve) -> None:
    address, _ = serve(completions_special=False)
    with httpx.Client(base_url=address, timeout=60) as http:
        plain = http.post("/tokenize", json={"prompt": TURN}).json()["count"]
        assert plain > 30 and completion(http, TURN)[1] == generated(http, TURN)[1] == raw(http, TURN)[1] == plain
        assert completion(http, [{"text": TURN, "special": True}])[1] == plain
        for path, body in (
            ("/v1/completions", ASK | {"prompt": "a"}),
            ("/generate", {"text": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            answer = http.post(path, json=body | {"parse_special": True})
            assert answer.status_code == 400 and "--completions-special off" in answer.json()["error"]["message"]


PIECES = ["<s>", "</s>", "<end>", "<mask>", "<tool>", " ", "\n", "the cat", "é", "12", "<to", "x  y"]


@pytest.fixture(scope="module", params=["byte-level", "prepend", "first", "never"])
def trained(request, tmp_path_factory) -> Any:
    """A client of a model whose tokenizer has BOS, and the same tokenizer in `tokenizers`."""
    reference = train_tokenizer(request.param)
    tokenizer = load_tokenizer(save_folder(reference, tmp_path_factory.mktemp(request.param), add_bos_token=True))
    assert tokenizer.add_bos
    return SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(context_length=999, vocab_size=999)), reference


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join))
def test_other_tokenizers_and_no_second_bos(trained, text) -> None:
    client, reference = trained
    ids, bos = reference.encode(text, add_special_tokens=False).ids, reference.token_to_id("<s>")
    (prompt,) = asyncio.run(read_prompts(text, client, True))
    assert prompt.ids == (ids if ids[:1] == [bos] else [bos, *ids])
    parts = [PromptPart(text, special=False)]
    (plain,) = asyncio.run(read_prompts(parts, client, True))
    assert plain.ids[0] == bos and not {reference.token_to_id(name) for name in PIECES[:4]} & set(plain.ids[1:])
    assert client.tokenizer.decode(plain.ids).lstrip() == text.lstrip()


def test_a_suffix_stands_behind_the_marks_of_the_model(tmp_path) -> None:
    reference = train_tokenizer("byte-level")
    reference.add_special_tokens([*MARKS[1]])
    tokenizer = load_tokenizer(save_folder(reference, tmp_path))
    client = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(context_length=999, vocab_size=999))
    begin, hole, end = (reference.token_to_id(mark) for mark in MARKS[1])
    before, after = reference.encode("the cat", add_special_tokens=False).ids, " on <fim_middle>"
    prompts = asyncio.run(read_prompts(["the cat"] * 2, client, True, after))
    whole = [tokenizer.bos_id, begin, *before, hole, *tokenizer.encode_plain(after), end]
    assert [prompt.ids for prompt in prompts] == [whole] * 2
    assert [prompt.plain_bytes for prompt in prompts] == [0, 0] and end not in tokenizer.encode_plain(after)
    with pytest.raises(ApiError, match="needs a prompt of text"):
        asyncio.run(read_prompts([1, 2], client, True, after))


@pytest.mark.parametrize(("path", "is_special"), [("/v1/completions", True), ("/api/generate", False)])
def test_a_suffix_over_http(monkeypatch, path, is_special) -> None:
    monkeypatch.setattr(raw_prompt, "MARKS", (("<|im_start|>", "<|endoftext|>", "<|im_end|>"),))
    server = ScriptedServer()
    body = {"model": "default", "prompt": "a<|im_start|>", "suffix": "b<|im_end|>"}
    assert server.post(path, body).status_code == 200
    tokens = [token for append in server.scheduler.sent(Append) for token in append.token_ids]
    begin, hole, end = (CONTROL[name] for name in ("<|im_start|>", "<|endoftext|>", "<|im_end|>"))
    prefix = [*b"a", begin] if is_special else [*b"a<|im_start|>"]
    assert tokens == [begin, *prefix, hole, *b"b<|im_end|>", end]
    echo = server.post("/v1/completions", body | {"echo": True})
    assert echo.status_code == 400 and echo.json()["error"]["param"] == "echo"
