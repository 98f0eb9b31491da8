"""A packed model whose matrices are stored in all layouts, mixed as in files, against the same numbers in float32."""

from __future__ import annotations

import pytest
import torch
from stored_weights import dequantized_weight, random_weight
from tiny_hf_models import all_logits, run, runner, text, write_gguf
from transformers import Qwen3Config, Qwen3ForCausalLM

from plait.kernels.cpu.decoder import CpuDecoder, missing_features
from plait.kernels.cpu.gemm.layouts import LAYOUTS
from plait.runtime.model_files.gguf import open_gguf

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
LAYOUT_NAMES = tuple(LAYOUTS)
SHAPE = dict(vocab_size=97, hidden_size=256, intermediate_size=256, num_hidden_layers=len(LAYOUT_NAMES), head_dim=64)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False)


def stored_matrices(model):
    """A StoredWeight for every matrix: in each of the layers every matrix has another layout."""
    stored = {}
    matrices = [(name, value) for name, value in model.named_parameters() if value.dim() == 2]
    for i, (name, value) in enumerate(matrices):
        weight = random_weight(LAYOUT_NAMES[(i + i // len(LAYOUT_NAMES)) % len(LAYOUT_NAMES)], *value.shape, seed=i)
        exact = dequantized_weight(weight)
        # A factor makes every matrix as large as a model's, whatever the layout's random numbers.
        weight = random_weight(weight.layout.name, *value.shape, seed=i, magnitude=0.01 * 0.06 / exact.std())
        stored[name] = weight
    return stored


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(a GGUF file in all layouts, one with the same numbers in F32)."""
    folder = tmp_path_factory.mktemp("layouts")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    stored = stored_matrices(model)
    with torch.no_grad():
        for name, weight in stored.items():
            model.get_parameter(name).copy_(torch.from_numpy(dequantized_weight(weight)))
    paths = folder / "layouts.gguf", folder / "exact.gguf"
    write_gguf(model, paths[0], stored={name: (weight.rows, weight.layout.name) for name, weight in stored.items()})
    write_gguf(model, paths[1])
    return paths


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def test_every_form_is_in_the_file(files):
    stored = {info.quantization for info in open_gguf(files[0]).tensors.values() if len(info.shape) == 2}
    assert stored == set(LAYOUT_NAMES)


@pytest.mark.parametrize("count", [1, 5, 100], ids=["one row", "8-bit products", "many rows"])
def test_logits_are_those_of_the_stored_numbers(files, count):
    packed, exact = runner(files[0], dtype="auto"), runner(files[1])
    assert isinstance(packed.model, CpuDecoder)
    assert {weight.layout.name for layer in packed.model.weights.layers for weight in layer.qkv} == set(LAYOUT_NAMES)
    tokens = text(count, 0)
    expected = all_logits(exact, tokens)
    assert relative_error(all_logits(packed, tokens), expected) < 0.03
    step = torch.cat([run(packed, [(tokens, range(count), i, 1, i)])[0] for i in range(min(count, 5))])
    assert relative_error(step, expected[: len(step)]) < 0.03
