"""A runtime process and the server on a tiny model that transformers computes: programs, forks, constraints, HTTP."""

from __future__ import annotations

import json
import re

import pytest
import tokenizers
from other_architectures import build_other
from served_process import Served
from tiny_hf_models import randomized, transformers_greedy
from tokenizers import decoders, models, pre_tokenizers

import plait
from plait import gen, select
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params

PROMPT = "The capital of France is"
GREEDY = sampling_params(max_tokens=6, temperature=0.0, ignore_eos=True)


def write_tokenizer(folder):
    """Byte-level tokens without merges, and one end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<|end|>", *letters])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, transformers' model, tokenizer)"""
    folder = tmp_path_factory.mktemp("starcoder2")
    reference = randomized(build_other("starcoder2", vocab_size=257, max_position_embeddings=256, eos_token_id=0))
    reference.save_pretrained(folder)
    return folder, reference, write_tokenizer(folder)


@pytest.fixture(scope="module")
def runtime(model):
    settings = dict(device="cpu", dtype="float32", max_pages=2000, max_batch_tokens=16, check_integrity=True)
    with Runtime(str(model[0]), progress=False, **settings) as runtime:
        yield runtime


def test_greedy_text_equals_transformers_cold_and_cached(model, runtime):
    _, reference, tokenizer = model
    prompt = tokenizer.encode(PROMPT).ids  # longer than max_batch_tokens: in chunks
    for is_cached in (False, True):
        session = runtime.client.open_session()
        session.append(PROMPT)
        result = session.generate(GREEDY).result()
        session.close()
        assert transformers_greedy(reference, prompt, result.token_ids) == result.token_ids
        assert (result.usage.cached_tokens > 0) is is_cached


def test_forks_select_and_constraints(runtime):
    @plait.function
    def program(s):
        s += PROMPT + select("city", ["Paris", "Rome", "Bern"])
        branches = s.fork(3)
        for branch in branches:
            branch += " in the year " + gen("year", regex="[12][0-9]{3}", temperature=1.0)
        s["years"] = [branch["year"] for branch in branches]

    run = program.run(backend=runtime, seed=5)
    assert run["city"] in ("Paris", "Rome", "Bern")
    assert len(run["years"]) == 3
    assert all(re.fullmatch("[12][0-9]{3}", year) for year in run["years"])


def test_a_request_over_http(model):
    server = Served(model[0], "--backend", "transformers", "--device", "cpu")
    try:
        body = {"model": "default", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = server.post(body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        server.close()
