"""Weights from safetensors and GGUF, compared with the transformers models from which they were written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fast_gguf_reader import Reader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from plait.kernels.gguf_dequantize import dequantize
from plait.runtime.errors import CorruptModel, InputError, ModelError, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.locate import locate_model
from plait.runtime.weights import safetensors_checkpoint
from plait.runtime.weights.checkpoint import open_checkpoint

F32 = torch.float32


def tiny(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """A random Llama saved by transformers."""
    settings = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | heads | changes)))
    model.save_pretrained(folder, max_shard_size=changes.get("shard", "1GB"))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny(path)
    return path


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy", dirs_exist_ok=True))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_safetensors_equal_the_saved_model(tmp_path: Path, tied: bool, bias: bool, shard: str) -> None:
    model = tiny(tmp_path, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, shard=shard)
    weights = open_checkpoint(tmp_path)
    expected = {name: value for name, value in model.state_dict().items() if not tied or "lm_head" not in name}
    assert set(weights.names()) == set(expected)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard != "1GB")
    for name, value in expected.items():
        assert torch.equal(weights.tensor(name, F32, "cpu"), value), name
    assert weights.tensor("model.norm.weight", torch.bfloat16, "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_model_saved_without_an_output_head(tmp_path: Path, tied: bool) -> None:
    model = tiny(tmp_path / "whole", tie_word_embeddings=tied)
    model.model.save_pretrained(tmp_path / "bare")
    weights = open_checkpoint(tmp_path / "bare")
    assert weights.config.has_lm_head == tied and weights.config.tie_word_embeddings
    expected = {name: value for name, value in model.state_dict().items() if "lm_head" not in name}
    assert set(weights.names()) == set(expected)
    for name, value in expected.items():
        assert torch.equal(weights.tensor(name, F32, "cpu"), value), name
    file = tmp_path / "whole/model.safetensors"  # normal names, but the head is missing
    save_file({name: value for name, value in load_file(file).items() if "lm_head" not in name}, file)
    if not tied:
        with pytest.raises(CorruptModel, match="lm_head"):
            open_checkpoint(tmp_path / "whole")


def test_tensors_are_read_directly_to_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors bypass host memory: the only handle that reads values was opened for the GPU."""
    read = []

    class Reader:
        def __init__(self, path: str, framework: str, device: str) -> None:
            self.inner, self.device = safe_open(path, framework=framework, device="cpu"), device

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append((name, self.device))
            return self.inner.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    monkeypatch.setattr(safetensors_checkpoint, "safe_open", Reader)
    weights = open_checkpoint(folder)
    for name in weights.names():
        weights.tensor(name, F32, torch.device("cuda", 0))
    assert read == [(name, "cuda:0") for name in weights.names()]


def interleaved(value: torch.Tensor, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter: the halves of each rotary pair side by side."""
    rows = value.reshape(heads, 2, -1, *value.shape[1:])
    return np.ascontiguousarray(rows.transpose(1, 2).reshape(value.shape).numpy())


def write_gguf(model: LlamaForCausalLM, path: Path, quantization: str, divisors: list[float] | None = None) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantization]
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    for name, value in model.state_dict().items():
        array = value.numpy()
        if "q_proj" in name:
            array = interleaved(value, config.num_attention_heads)
        if "k_proj" in name:
            array = interleaved(value, config.num_key_value_heads)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if array.ndim == 2 and quantization != "F32":
            writer.add_tensor(theirs, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("bias", [True, False])
def test_gguf_tensors_have_the_row_order_of_transformers(tmp_path: Path, bias: bool) -> None:
    model = tiny(tmp_path, attention_bias=bias)
    write_gguf(model, tmp_path / "m.gguf", "F32")
    weights, same = open_checkpoint(tmp_path / "m.gguf"), open_checkpoint(tmp_path)
    assert weights.names() == same.names()
    assert not weights.config.tie_word_embeddings
    for name in same.names():
        assert torch.equal(weights.tensor(name, F32, "cpu"), same.tensor(name, F32, "cpu")), name


def test_raw_blocks_have_the_row_order_of_transformers(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    write_gguf(model, tmp_path / "m.gguf", "Q8_0")
    weights = open_checkpoint(tmp_path / "m.gguf")
    for name, value in model.state_dict().items():
        quantization, blocks, shape = weights.raw_blocks(name)
        assert (quantization, shape) == ("Q8_0" if value.ndim == 2 else "F32", tuple(value.shape))
        assert blocks.shape[0] == (shape[0] if value.ndim == 2 else 1)
        got = dequantize(torch.from_numpy(blocks), quantization, shape)
        assert torch.equal(got, weights.tensor(name, F32, "cpu"))
        assert (got - value).abs().max() <= value.abs().max() / 100


def test_embedded_model_equals_the_gguf_package() -> None:
    path = locate_model()
    weights = open_checkpoint(path)
    stored = {tensor.name: tensor for tensor in Reader(path).tensors}
    assert len(weights.names()) == len(stored)
    names = {
        "model.layers.0.self_attn.q_proj.weight": ("blk.0.attn_q.weight", 9),
        "model.layers.29.self_attn.k_proj.weight": ("blk.29.attn_k.weight", 3),
        "model.layers.7.mlp.down_proj.weight": ("blk.7.ffn_down.weight", 0),
        "model.layers.7.self_attn.v_proj.weight": ("blk.7.attn_v.weight", 0),
        "model.layers.3.post_attention_layernorm.weight": ("blk.3.ffn_norm.weight", 0),
        "model.embed_tokens.weight": ("token_embd.weight", 0),
    }
    for name, (theirs, heads) in names.items():
        ours = weights.tensor(name, F32, "cpu")
        expected = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        np.testing.assert_array_equal(interleaved(ours, heads) if heads else ours.numpy(), expected)


def test_llama3_divisors_are_read_from_their_tensor(tmp_path: Path) -> None:
    divisors = [1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0]
    write_gguf(tiny(tmp_path), tmp_path / "m.gguf", "F32", divisors)
    scaling = open_checkpoint(tmp_path / "m.gguf").config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, list(scaling.divisors)) == ("divisors", divisors)


def test_missing_tensors_and_wrong_shapes_are_rejected(folder: Path, tmp_path: Path) -> None:
    copy = copied(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"no tensor 'model\.norm\.weight'"):
        open_checkpoint(copy)
    save_file(tensors | {"model.norm.weight": norm[:-1]}, copy / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"'model\.norm\.weight' has the shape \(63,\)"):
        open_checkpoint(copy)
    save_file(tensors | {"model.norm.weight": norm.to(torch.int8)}, copy / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="int8"):
        open_checkpoint(copy).tensor("model.norm.weight", F32, "cpu")
    with pytest.raises(CorruptModel, match="no tensor 'nothing'"):
        open_checkpoint(folder).tensor("nothing", F32, "cpu")
    with pytest.raises(InputError):
        open_checkpoint(folder).raw_blocks("model.norm.weight")


def test_gguf_with_a_missing_tensor_is_rejected(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    model.config.num_hidden_layers = 3
    write_gguf(model, tmp_path / "m.gguf", "F32")
    with pytest.raises(CorruptModel, match=r"model\.layers\.2\.input_layernorm"):
        open_checkpoint(tmp_path / "m.gguf")


def test_unsupported_quantization_is_rejected(tmp_path: Path) -> None:
    write_gguf(tiny(tmp_path), tmp_path / "m.gguf", "F32")
    content = (tmp_path / "m.gguf").read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8
    (tmp_path / "m.gguf").write_bytes(content[:at] + (26).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(UnsupportedModel, match="I32"):
        open_checkpoint(tmp_path / "m.gguf").tensor("model.norm.weight", F32, "cpu")


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "x.bin", 3, "missing.safetensors"])
def test_index_with_a_file_outside_the_folder_is_rejected(folder: Path, tmp_path: Path, file: Any) -> None:
    copy = copied(folder, tmp_path)
    index = {"weight_map": {"model.embed_tokens.weight": file}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound if file == "missing.safetensors" else CorruptModel):
        open_checkpoint(copy)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_folders_raise_model_errors(folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    copy = copied(folder, tmp_path)
    path = copy / data.draw(st.sampled_from(["model.safetensors", "config.json"]))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, min(len(content), 2500) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=6))
        content[at : at + len(patch)] = patch
    path.write_bytes(content)
    try:
        weights = open_checkpoint(copy)
        for name in weights.names():
            weights.tensor(name, F32, "cpu")
    except ModelError as error:
        assert str(error)  # noqa: PT017 (no error at all is fine too: a changed number may be sound)


def test_missing_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        open_checkpoint(tmp_path)
