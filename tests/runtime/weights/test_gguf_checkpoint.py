"""Weights from GGUF files, compared with transformers and with the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from fast_gguf_reader import Reader
from tiny_hf_models import interleaved, write_gguf
from tiny_llama_checkpoints import save_tiny_llama

from plait.kernels.gguf_dequantize import dequantize
from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.model_files.locate import locate_model
from plait.runtime.weights.checkpoint import open_checkpoint

F32 = torch.float32


@pytest.mark.parametrize("bias", [True, False])
def test_gguf_tensors_have_the_row_order_of_transformers(tmp_path: Path, bias: bool) -> None:
    model = save_tiny_llama(tmp_path, attention_bias=bias)
    write_gguf(model, tmp_path / "m.gguf", "F32")
    weights, safetensors = open_checkpoint(tmp_path / "m.gguf"), open_checkpoint(tmp_path)
    assert weights.names() == safetensors.names()
    assert not weights.config.tie_word_embeddings
    for name in safetensors.names():
        assert torch.equal(weights.tensor(name, F32, "cpu"), safetensors.tensor(name, F32, "cpu")), name


def test_raw_blocks_have_the_row_order_of_transformers(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path)
    write_gguf(model, tmp_path / "m.gguf", "Q8_0")
    weights = open_checkpoint(tmp_path / "m.gguf")
    for name, value in model.state_dict().items():
        quantization, blocks, shape = weights.raw_blocks(name)
        assert (quantization, shape) == ("Q8_0" if value.ndim == 2 else "F32", tuple(value.shape))
        assert blocks.shape[0] == (shape[0] if value.ndim == 2 else 1)
        dequantized = dequantize(torch.from_numpy(blocks), quantization, shape)
        assert torch.equal(dequantized, weights.tensor(name, F32, "cpu"))
        assert (dequantized - value).abs().max() <= value.abs().max() / 100


def test_a_vector_stored_in_blocks_is_read(tmp_path: Path) -> None:
    model, name = save_tiny_llama(tmp_path), "model.norm.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(model.state_dict()[name].numpy(), kind)
    write_gguf(model, tmp_path / "m.gguf", stored={name: (blocks, "Q8_0")})
    weights, expected = open_checkpoint(tmp_path / "m.gguf"), gguf.quants.dequantize(blocks, kind)
    assert weights.stored_type(name) == "Q8_0"
    np.testing.assert_array_equal(weights.tensor(name, F32, "cpu").numpy(), expected)
    np.testing.assert_array_equal(weights.float32_array(name), expected)


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
    for name, (gguf_name, heads) in names.items():
        ours = weights.tensor(name, F32, "cpu")
        expected = gguf.quants.dequantize(stored[gguf_name].data, stored[gguf_name].tensor_type)
        np.testing.assert_array_equal(interleaved(ours, heads) if heads else ours.numpy(), expected)


def test_llama3_divisors_are_read_from_their_tensor(tmp_path: Path) -> None:
    divisors = [1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0]
    write_gguf(save_tiny_llama(tmp_path), tmp_path / "m.gguf", "F32", divisors)
    scaling = open_checkpoint(tmp_path / "m.gguf").config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, list(scaling.divisors)) == ("divisors", divisors)


def test_gguf_with_a_missing_tensor_is_rejected(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path)
    model.config.num_hidden_layers = 3
    write_gguf(model, tmp_path / "m.gguf", "F32")
    with pytest.raises(CorruptModel, match=r"model\.layers\.2\.input_layernorm"):
        open_checkpoint(tmp_path / "m.gguf")


def test_unsupported_quantization_is_rejected(tmp_path: Path) -> None:
    write_gguf(save_tiny_llama(tmp_path), tmp_path / "m.gguf", "F32")
    content = (tmp_path / "m.gguf").read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8
    (tmp_path / "m.gguf").write_bytes(content[:at] + (26).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(UnsupportedModel, match="I32"):
        open_checkpoint(tmp_path / "m.gguf").tensor("model.norm.weight", F32, "cpu")
