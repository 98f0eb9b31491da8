"""How model files say that a model pools: sentence-transformers folders and GGUF metadata."""

from __future__ import annotations

import json

import pytest
from tiny_embedding_model import SIZE, write_embedder, write_modules

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.models.loading.pooling import Pooling, UnsupportedPooling, read_pooling
from plait.runtime.weights.checkpoint import open_checkpoint


def write_prompts(folder, **config):
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))


def test_the_default_prompt_of_a_folder(tmp_path):
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


def test_pooling_of_a_sentence_transformers_folder(folder):
    assert read_pooling(folder) == Pooling("last", True)
    write_modules(folder, "mean_tokens", normalize=False)
    assert read_pooling(folder) == Pooling("mean", False)
    pool(folder, word_embedding_dimension=SIZE)
    assert read_pooling(folder) == Pooling("mean", False), "the default of sentence-transformers"
    pool(folder, pooling_mode="lasttoken")
    assert read_pooling(folder) == Pooling("last", False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: write_modules(folder, "cls_token"), "cls"),
        (lambda folder: write_modules(folder, "max_tokens"), "'max'"),
        (lambda folder: pool(folder, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=True), "2 ways"),
        (lambda folder: pool(folder, pooling_mode_mean_tokens=False), "0 ways"),
        (lambda folder: modules(folder, "Transformer", "Pooling", "Dense", "Normalize"), "Dense"),
        (lambda folder: modules(folder, "Transformer"), "modules are Transformer"),
        (lambda folder: (folder / "modules.json").unlink(), "do not define"),
        (lambda folder: (folder / "config.json").write_text('{"auto_map": {"AutoModel": "x.Y"}}'), "custom code"),
    ],
)
def test_unsupported_pooling_gives_a_reason(folder, change, reason):
    change(folder)
    pooling = read_pooling(folder)
    assert isinstance(pooling, UnsupportedPooling) and reason in pooling.reason


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "modules.json").write_text("{}"),
        lambda folder: (folder / "modules.json").write_text("[1]"),
        lambda folder: (folder / "modules.json").write_text("["),
        lambda folder: modules(folder, "Transformer", "Pooling", path="../1_Pooling"),
        lambda folder: modules(folder, "Transformer", "Pooling", path=".."),
        lambda folder: modules(folder, "Transformer", "Pooling", path="2_Pooling"),
        lambda folder: pool(folder, pooling_mode_lasttoken="yes"),
    ],
)
def test_corrupt_folders_raise_a_model_error(folder, change):
    change(folder)
    with pytest.raises(ModelError):
        read_pooling(folder)


@pytest.mark.parametrize(
    ("pooling_type", "expected"),
    [
        (None, "do not define"),
        (0, "do not define"),
        (1, "mean"),
        (2, "cls"),
        (3, "last"),
        (4, "rank"),
        (5, CorruptModel),
    ],
)
def test_pooling_type_of_a_gguf_file(tmp_path, pooling_type, expected):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    if pooling_type is not None:
        writer.add_uint32("qwen3.pooling_type", pooling_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    if expected is CorruptModel:
        with pytest.raises(CorruptModel):
            read_pooling(tmp_path / "model.gguf")
    elif expected in ("mean", "last"):
        assert read_pooling(tmp_path / "model.gguf") == Pooling(expected, True)
    else:
        assert expected in read_pooling(tmp_path / "model.gguf").reason


@pytest.mark.parametrize("setting", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_bidirectional_attention_is_refused(tmp_path, setting):
    write_embedder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | setting))
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        open_checkpoint(tmp_path)
