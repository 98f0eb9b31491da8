"""Embeddings of a tiny random model against transformers' hidden states, and how files say that a model pools."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_embedding_model import END, SIZE, TEXTS, states, token_ids, write_embedder, write_modules
from transformers import AutoTokenizer

from plait.runtime.errors import Aborted, CorruptModel, InputError, ModelError, UnsupportedModel
from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
from plait.runtime.executor.runner import SUM_QUANTUM
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.models.loading.pooling import Pooling, UnsupportedPooling, read_pooling
from plait.runtime.process.engine import Engine
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params
from plait.runtime.tokenizer.tokenizer import load_tokenizer
from plait.runtime.weights.checkpoint import open_checkpoint

KINDS = {"last": ("lasttoken", True), "mean": ("mean_tokens", False)}
SETTINGS = dict(device="cpu", max_pages=4000, check_integrity=True, deterministic=True)
GENERATED = sampling_params(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=list(KINDS))
def made(request, tmp_path_factory):
    """(folder, transformers' model, the expected vector of each text)"""
    folder = tmp_path_factory.mktemp(request.param)
    mode, normalize = KINDS[request.param]
    model = write_embedder(folder, mode, normalize)

    def expected(text):
        found = states(model, token_ids(folder, text))
        pooled = found[-1] if request.param == "last" else found.mean(0)
        return pooled / np.linalg.norm(pooled) if normalize else pooled

    return folder, expected, request.param


@pytest.fixture(scope="module")
def engine(made):
    with Engine(str(made[0]), dtype="float32", max_batch_tokens=16, **SETTINGS) as engine:
        yield engine


def test_vectors_are_those_of_transformers_alone_chunked_cold_and_cached(made, engine):
    _, expected, _ = made
    whole = engine.embed(TEXTS)  # the longest takes eleven steps
    assert whole.dtype == np.float32 and whole.shape == (len(TEXTS), SIZE)
    for text, found in zip(TEXTS, whole, strict=True):
        np.testing.assert_allclose(found, expected(text), atol=1e-4)
    again = [engine.embed([text]) for text in TEXTS]  # each alone, its prefix cached
    assert np.concatenate(again).tobytes() == whole.tobytes()
    engine.client.flush_cache()
    assert engine.embed(TEXTS[::-1])[::-1].tobytes() == whole.tobytes()
    assert engine.client.status().held_pages == 0


def test_beside_generation_both_are_what_they_are_alone(made, engine):
    def generate():
        session = engine.client.open_session()
        session.append("one two three ")
        return session, session.generate(GENERATED)

    alone, whole = generate()[1].result().token_ids, engine.embed(TEXTS)
    engine.client.flush_cache()
    started = [generate() for _ in range(3)]
    beside = engine.embed(TEXTS)
    assert beside.tobytes() == whole.tobytes()
    for session, call in started:
        assert call.result().token_ids == alone
        session.close()


def test_one_of_many_calls_is_aborted(made, engine):
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


def test_dimensions_and_what_is_refused(made, engine):
    _, expected, kind = made
    cut = engine.embed(TEXTS[:1], 10)[0]
    wanted = expected(TEXTS[0])[:10]
    np.testing.assert_allclose(cut, wanted / np.linalg.norm(wanted) if kind == "last" else wanted, atol=1e-4)
    assert engine.embed([]).shape == (0, SIZE)
    for wrong in ("text", [1], [None]):
        with pytest.raises(InputError):
            engine.embed(wrong)
    for wrong in (0, -1, SIZE + 1, True, 2.0):
        with pytest.raises(InputError, match="dimensions"):
            engine.embed(["a"], wrong)


def test_a_text_ends_as_the_models_own_tokenizer_ends_it(made):
    """And the end token that a text names is spelled, not meant."""
    folder, _, _ = made
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        assert tokenizer.encode_with_special_tokens(text) == token_ids(folder, text)
        if END not in text:
            assert tokenizer.encode_with_special_tokens(text) == theirs(text)["input_ids"]


def write_prompts(folder, **config):
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))


PROMPT = "Instruct: find it<|im_end|>\nQuery: "  # with a control token, which is the model's own to write


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_the_default_prompt_of_its_files_stands_before_every_text(tmp_path, mode):
    model = write_embedder(tmp_path, mode, normalize=False)
    with Engine(str(tmp_path), dtype="float32", **SETTINGS) as engine:
        plain = engine.embed(TEXTS)
    write_prompts(tmp_path, prompts={"query": PROMPT, "document": "Text: "}, default_prompt_name="query")
    assert read_pooling(tmp_path).prompt == PROMPT
    own = AutoTokenizer.from_pretrained(str(tmp_path))
    with Engine(str(tmp_path), dtype="float32", **SETTINGS) as engine:
        for text, found, before in zip(TEXTS, engine.embed(TEXTS), plain, strict=True):
            ids = engine.client.encode_for_embedding(text)
            if END not in text:
                assert ids == own(PROMPT + text)["input_ids"]
            seen = states(model, ids)
            np.testing.assert_allclose(found, seen[-1] if mode == "lasttoken" else seen.mean(0), atol=1e-4)
            assert not np.allclose(found, before, atol=1e-3)
        with pytest.raises(InputError):
            engine.embed(["\ud800"])


def test_which_prompt_a_folder_names(tmp_path):
    write_embedder(tmp_path)
    for config, prompt in [
        ({}, ""),
        ({"prompts": {"a": "A: "}}, ""),
        ({"prompts": {"a": "A: "}, "default_prompt_name": None}, ""),
        ({"prompts": {"a": "A: "}, "default_prompt_name": "a"}, "A: "),
        ({"default_prompt_name": "query"}, ""),
    ]:
        write_prompts(tmp_path, **config)
        assert read_pooling(tmp_path) == Pooling("last", True, prompt), config
    for wrong in ({"prompts": ["A"]}, {"prompts": {"a": 1}}, {"default_prompt_name": "b"}, {"default_prompt_name": 1}):
        write_prompts(tmp_path, **wrong)
        with pytest.raises(CorruptModel, match="prompt"):
            read_pooling(tmp_path)
    write_prompts(tmp_path, prompts={"a": "A: "}, default_prompt_name="a")
    write_modules(tmp_path, "mean_tokens")
    pooling = json.loads((tmp_path / "1_Pooling/config.json").read_text())
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling | {"include_prompt": False}))
    assert "include_prompt" in read_pooling(tmp_path).reason


def test_a_config_that_asks_for_the_end_token_gets_it(tmp_path):
    write_embedder(tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens | {"post_processor": None}))
    assert load_tokenizer(tmp_path).suffix_ids == ()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_eos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.suffix_ids == tokenizer.eos_ids[:1]


def test_a_model_without_an_output_head_embeds_in_another_process_and_does_not_generate(tmp_path):
    model = write_embedder(tmp_path, head=False)
    assert not open_checkpoint(tmp_path).config.has_lm_head
    with Runtime(str(tmp_path), dtype="float32", progress=False, **SETTINGS) as runtime:
        for text, found in zip(TEXTS, runtime.embed(TEXTS), strict=True):
            pooled = states(model, token_ids(tmp_path, text))[-1]
            np.testing.assert_allclose(found, pooled / np.linalg.norm(pooled), atol=1e-4)
        session = runtime.client.open_session()
        session.append("text")
        for refused in (lambda: session.generate(GENERATED), lambda: session.select(["a", "b"])):
            with pytest.raises(UnsupportedModel, match="no output head"):
                refused()


def test_packed_weights_give_nearly_the_same_and_to_the_bit_the_same_each_time(made):
    folder, expected, _ = made
    packed = dict(dtype="bfloat16", weights="int8")
    with Engine(str(folder), max_batch_tokens=16, **packed, **SETTINGS) as engine:
        assert isinstance(engine.engine_loop.model_runner, PackedCpuRunner)
        whole = engine.embed(TEXTS)
        assert np.concatenate([engine.embed([text]) for text in TEXTS]).tobytes() == whole.tobytes()
    for text, found in zip(TEXTS, whole, strict=True):
        wanted = expected(text)
        assert found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted) > 0.99


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_what_a_mean_adds_up_is_the_same_in_any_chunks(count, cut, seed):
    """Of both runners, which need nothing of themselves for it."""
    chance = np.random.default_rng(seed)
    states = chance.standard_normal((count, 5), np.float32) * chance.choice([1e-9, 1, 1e4], (count, 1)).astype("f4")
    for total, of in ((PackedCpuRunner.total, np.asarray), (TorchRunner.total, torch.from_numpy)):
        whole = total(None, of(states))
        parts = total(None, of(states[:cut])) + total(None, of(states[cut:]))
        assert whole.dtype == np.float64 and parts.tobytes() == whole.tobytes()
        np.testing.assert_allclose(whole, states.astype(np.float64).sum(0), atol=count * SUM_QUANTUM / 2)


# -- what files say -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_modules(tmp_path, "lasttoken")
    return tmp_path


def pool(folder, **config):
    (folder / "1_Pooling/config.json").write_text(json.dumps(config))


def modules(folder, *types, path="1_Pooling"):
    entries = [
        {"type": f"sentence_transformers.models.{kind}", "path": path if i else ""} for i, kind in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))


def test_what_a_folder_says(folder):
    assert read_pooling(folder) == Pooling("last", True)
    write_modules(folder, "mean_tokens", normalize=False)
    assert read_pooling(folder) == Pooling("mean", False)
    pool(folder, word_embedding_dimension=SIZE)
    assert read_pooling(folder) == Pooling("mean", False), "what sentence-transformers takes where nothing is said"
    pool(folder, pooling_mode="lasttoken")
    assert read_pooling(folder) == Pooling("last", False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda at: write_modules(at, "cls_token"), "cls"),
        (lambda at: write_modules(at, "max_tokens"), "'max'"),
        (lambda at: pool(at, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=True), "2 ways"),
        (lambda at: pool(at, pooling_mode_mean_tokens=False), "0 ways"),
        (lambda at: modules(at, "Transformer", "Pooling", "Dense", "Normalize"), "Dense"),
        (lambda at: modules(at, "Transformer"), "modules are Transformer"),
        (lambda at: (at / "modules.json").unlink(), "do not say"),
        (lambda at: (at / "config.json").write_text('{"auto_map": {"AutoModel": "x.Y"}}'), "code of their own"),
    ],
)
def test_folders_that_give_no_embeddings_say_why(folder, change, reason):
    change(folder)
    found = read_pooling(folder)
    assert isinstance(found, UnsupportedPooling) and reason in found.reason


@pytest.mark.parametrize(
    "change",
    [
        lambda at: (at / "modules.json").write_text("{}"),
        lambda at: (at / "modules.json").write_text("[1]"),
        lambda at: (at / "modules.json").write_text("["),
        lambda at: modules(at, "Transformer", "Pooling", path="../1_Pooling"),
        lambda at: modules(at, "Transformer", "Pooling", path=".."),
        lambda at: modules(at, "Transformer", "Pooling", path="2_Pooling"),
        lambda at: pool(at, pooling_mode_lasttoken="yes"),
    ],
)
def test_damaged_folders_end_in_a_model_error(folder, change):
    change(folder)
    with pytest.raises(ModelError):
        read_pooling(folder)


@pytest.mark.parametrize(
    ("number", "found"),
    [(None, "do not say"), (0, "do not say"), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank"), (5, CorruptModel)],
)
def test_what_a_gguf_says(tmp_path, number, found):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    if number is not None:
        writer.add_uint32("qwen3.pooling_type", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    if found is CorruptModel:
        with pytest.raises(CorruptModel):
            read_pooling(tmp_path / "model.gguf")
    elif found in ("mean", "last"):
        assert read_pooling(tmp_path / "model.gguf") == Pooling(found, True)
    else:
        assert found in read_pooling(tmp_path / "model.gguf").reason


@pytest.mark.parametrize("said", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_bidirectional_attention_is_refused_by_name(tmp_path, said):
    write_embedder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        open_checkpoint(tmp_path)
