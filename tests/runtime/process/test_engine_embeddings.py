"""Embeddings of a tiny random model, compared with hidden states computed by transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_embedding_model import END, SIZE, TEXTS, states, token_ids, write_embedder
from transformers import AutoTokenizer

from plait.runtime.errors import Aborted, InputError, UnsupportedModel
from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
from plait.runtime.executor.runner import SUM_QUANTUM
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.models.loading.pooling import read_pooling
from plait.runtime.process.engine import Engine
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params
from plait.runtime.tokenizer.tokenizer import load_tokenizer
from plait.runtime.weights.checkpoint import open_checkpoint

KINDS = {"last": ("lasttoken", True), "mean": ("mean_tokens", False)}
SETTINGS = dict(device="cpu", max_pages=4000, check_integrity=True, deterministic=True)
GENERATED = sampling_params(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=list(KINDS))
def embedding_model(request, tmp_path_factory):
    """(model folder, function from a text to its expected vector, pooling)"""
    folder = tmp_path_factory.mktemp(request.param)
    mode, normalize = KINDS[request.param]
    model = write_embedder(folder, mode, normalize)

    def expected(text):
        hidden_states = states(model, token_ids(folder, text))
        pooled = hidden_states[-1] if request.param == "last" else hidden_states.mean(0)
        return pooled / np.linalg.norm(pooled) if normalize else pooled

    return folder, expected, request.param


@pytest.fixture(scope="module")
def engine(embedding_model):
    with Engine(str(embedding_model[0]), dtype="float32", max_batch_tokens=16, **SETTINGS) as engine:
        yield engine


def test_vectors_equal_transformers_and_do_not_depend_on_the_batch(embedding_model, engine):
    _, expected, _ = embedding_model
    vectors = engine.embed(TEXTS)  # the longest text needs eleven steps
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), SIZE)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(vector, expected(text), atol=1e-4)
    again = [engine.embed([text]) for text in TEXTS]  # one at a time, with cached prefixes
    assert np.concatenate(again).tobytes() == vectors.tobytes()
    engine.client.flush_cache()
    assert engine.embed(TEXTS[::-1])[::-1].tobytes() == vectors.tobytes()
    assert engine.client.status().used_pages == 0


def test_embedding_and_generation_do_not_affect_each_other(embedding_model, engine):
    def generate():
        session = engine.client.open_session()
        session.append("one two three ")
        return session, session.generate(GENERATED)

    token_ids, vectors = generate()[1].result().token_ids, engine.embed(TEXTS)
    engine.client.flush_cache()
    started = [generate() for _ in range(3)]
    vectors_beside_generation = engine.embed(TEXTS)
    assert vectors_beside_generation.tobytes() == vectors.tobytes()
    for session, call in started:
        assert call.result().token_ids == token_ids
        session.close()


def test_aborting_one_call_leaves_the_others(embedding_model, engine):
    sessions = [engine.client.open_session() for _ in range(6)]
    calls = []
    for session in sessions:
        session.append("one two three " * 30)
        calls.append(session.embed())
    calls[3].abort()
    ends = []
    for call in calls:
        try:
            ends.append(call.result().embedding_bytes)
        except Aborted:
            ends.append(None)
    assert None not in ends[:3] + ends[4:] and len({*ends[:3], *ends[4:]}) == 1
    assert ends[3] in (None, ends[0])
    for session in sessions:
        session.close()


def test_dimensions_and_invalid_arguments(embedding_model, engine):
    _, expected, kind = embedding_model
    cut = engine.embed(TEXTS[:1], 10)[0]
    truncated = expected(TEXTS[0])[:10]
    np.testing.assert_allclose(cut, truncated / np.linalg.norm(truncated) if kind == "last" else truncated, atol=1e-4)
    assert engine.embed([]).shape == (0, SIZE)
    for wrong in ("text", [1], [None]):
        with pytest.raises(InputError):
            engine.embed(wrong)
    for wrong in (0, -1, SIZE + 1, True, 2.0):
        with pytest.raises(InputError, match="dimensions"):
            engine.embed(["a"], wrong)


def test_texts_end_with_the_suffix_of_the_models_tokenizer(embedding_model):
    """The end token inside a text is encoded as plain text."""
    folder, _, _ = embedding_model
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        assert tokenizer.encode_with_special_tokens(text) == token_ids(folder, text)
        if END not in text:
            assert tokenizer.encode_with_special_tokens(text) == reference(text)["input_ids"]


def write_prompts(folder, **config):
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))


PROMPT = "Instruct: find it<|im_end|>\nQuery: "  # with a control token, which only the model's files may contain


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_the_default_prompt_of_the_files_precedes_every_text(tmp_path, mode):
    model = write_embedder(tmp_path, mode, normalize=False)
    with Engine(str(tmp_path), dtype="float32", **SETTINGS) as engine:
        plain = engine.embed(TEXTS)
    write_prompts(tmp_path, prompts={"query": PROMPT, "document": "Text: "}, default_prompt_name="query")
    assert read_pooling(tmp_path).prompt == PROMPT
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    with Engine(str(tmp_path), dtype="float32", **SETTINGS) as engine:
        for text, vector, before in zip(TEXTS, engine.embed(TEXTS), plain, strict=True):
            ids = engine.client.encode_for_embedding(text)
            if END not in text:
                assert ids == reference(PROMPT + text)["input_ids"]
            hidden_states = states(model, ids)
            expected = hidden_states[-1] if mode == "lasttoken" else hidden_states.mean(0)
            np.testing.assert_allclose(vector, expected, atol=1e-4)
            assert not np.allclose(vector, before, atol=1e-3)
        with pytest.raises(InputError):
            engine.embed(["\ud800"])


def test_add_eos_token_in_the_config_adds_the_suffix(tmp_path):
    write_embedder(tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens | {"post_processor": None}))
    assert load_tokenizer(tmp_path).suffix_ids == ()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_eos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.suffix_ids == tokenizer.eos_ids[:1]


def test_a_model_without_an_output_head_embeds_and_does_not_generate(tmp_path):
    model = write_embedder(tmp_path, head=False)
    assert not open_checkpoint(tmp_path).config.has_lm_head
    with Runtime(str(tmp_path), dtype="float32", progress=False, **SETTINGS) as runtime:
        for text, vector in zip(TEXTS, runtime.embed(TEXTS), strict=True):
            pooled = states(model, token_ids(tmp_path, text))[-1]
            np.testing.assert_allclose(vector, pooled / np.linalg.norm(pooled), atol=1e-4)
        session = runtime.client.open_session()
        session.append("text")
        for call in (lambda: session.generate(GENERATED), lambda: session.select(["a", "b"])):
            with pytest.raises(UnsupportedModel, match="no output head"):
                call()


def test_packed_weights_are_close_and_reproducible(embedding_model):
    folder, expected, _ = embedding_model
    packed = dict(dtype="bfloat16", weights="int8")
    with Engine(str(folder), max_batch_tokens=16, **packed, **SETTINGS) as engine:
        assert isinstance(engine.engine_loop.model_runner, PackedCpuRunner)
        vectors = engine.embed(TEXTS)
        assert np.concatenate([engine.embed([text]) for text in TEXTS]).tobytes() == vectors.tobytes()
    for text, vector in zip(TEXTS, vectors, strict=True):
        reference = expected(text)
        assert vector @ reference / np.linalg.norm(vector) / np.linalg.norm(reference) > 0.99


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_sums_of_hidden_states_do_not_depend_on_the_chunks(count, cut, seed):
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((count, 5), np.float32) * rng.choice([1e-9, 1, 1e4], (count, 1)).astype("f4")
    for runner, convert in ((PackedCpuRunner, np.asarray), (TorchRunner, torch.from_numpy)):
        total = runner.sum_hidden_states(None, convert(states))
        parts = runner.sum_hidden_states(None, convert(states[:cut]))
        parts = parts + runner.sum_hidden_states(None, convert(states[cut:]))
        assert total.dtype == np.float64 and parts.tobytes() == total.tobytes()
        np.testing.assert_allclose(total, states.astype(np.float64).sum(0), atol=count * SUM_QUANTUM / 2)
