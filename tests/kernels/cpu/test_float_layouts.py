"""Packed models whose matrices are floats: from GGUF files and safetensors folders, against transformers."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from example_share import sample_of
from family_cases import FAMILY_CASES
from tiny_hf_models import (
    all_logits,
    has_experts,
    randomized,
    relative_error,
    run,
    runner,
    text,
    transformers_logits,
    write_gguf,
)

from plait.kernels.cpu import amx
from plait.kernels.cpu.decoder import CpuDecoder, missing_features

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-23: the kernels need AVX2")
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
MULTIPLIES_IN_BFLOAT16 = {"with the CPU's instructions": amx.available(), "without AMX": False}
FAMILIES = sorted(FAMILY_CASES)


def rounded_model(family, dtype):
    """A tiny model, whose numbers `dtype` represents exactly, in float32."""
    case = FAMILY_CASES[family]
    variant = next(iter(case.packed_variants.values()))
    settings = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3) | dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512
    )
    model = randomized(case.model_class(case.model_class.config_class(**settings | variant)))
    return model.to(dtype).float()


def packed_runner(path, instructions, **settings):
    packed = runner(path, dtype="auto", **settings)
    assert isinstance(packed.model, CpuDecoder)
    if instructions == "without AMX":
        packed.model = CpuDecoder(packed.model.weights, threads=2, amx_min_tokens=None)
    return packed


def forms_of(packed):
    layers = packed.model.weights.layers
    return {weight.layout.name for layer in layers for weight in (*layer.qkv, layer.output, layer.down)}


def rounded_to_8_bits(x):
    """In blocks of 32 with the largest magnitude at 127, as the packed step rounds activations."""
    blocks = x.reshape(-1, 32)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scales.where(scales > 0, torch.ones(()))).round() * scales).reshape(x.shape)


def error_of_rounding(model, texts, weights):
    """The relative error of transformers' own logits if the inputs of its products, and `weights`, have 8 bits."""
    rounded = copy.deepcopy(model)
    for layer in (layer for layer in rounded.modules() if isinstance(layer, torch.nn.Linear)):
        layer.register_forward_pre_hook(lambda _, inputs: rounded_to_8_bits(inputs[0]))
        if weights:
            layer.weight.data = rounded_to_8_bits(layer.weight.data)
    exact, other = (torch.cat([transformers_logits(one, tokens) for tokens in texts]) for one in (model, rounded))
    return relative_error(other, exact, has_experts(model))


def assert_logits_equal(packed, model, bfloat16=False, int8_weights=False):
    """Up to half as much again as rounding alone explains; products in bfloat16 have a limit of 2%.

    A model with experts gets many short texts: all tokens behind one to which rounding gives another expert differ.
    """
    experts = has_experts(model)
    texts = [text(5, seed) for seed in range(20)] if experts else [text(100, 100), text(5, 5), text(1, 1)]
    limit = 0.02 if bfloat16 else 0.005 + 1.5 * error_of_rounding(model, texts if experts else texts[:1], int8_weights)
    exact = [transformers_logits(model, tokens) for tokens in texts]
    if experts:  # in one step, whose tokens are grouped by expert
        rows = [(tokens, range(5 * i, 5 * i + 5), 0, 5, 0) for i, tokens in enumerate(texts)]
        assert relative_error(torch.cat(run(packed, rows)), torch.cat(exact), experts) < limit
    else:
        for tokens, expected in zip(texts, exact, strict=True):
            assert relative_error(all_logits(packed, tokens), expected) < limit
    one_by_one = [
        run(packed, [(tokens, range(100), i, 1, i)])[0] for tokens in texts for i in range(min(3, len(tokens)))
    ]
    assert relative_error(torch.cat(one_by_one), torch.cat([part[:3] for part in exact]), experts) < limit


@pytest.mark.parametrize("instructions", MULTIPLIES_IN_BFLOAT16)
@pytest.mark.parametrize("name", DTYPES)
def test_gguf_files_of_floats(name, instructions, tmp_path):
    model = rounded_model("llama", DTYPES[name])
    write_gguf(model, tmp_path / "m.gguf", name)
    packed = packed_runner(tmp_path / "m.gguf", instructions)
    assert forms_of(packed) == {name}
    assert_logits_equal(packed, model, MULTIPLIES_IN_BFLOAT16[instructions])


@pytest.mark.parametrize(("family", "name"), sample_of(list(product(FAMILIES, DTYPES)), least=13))  # every family
def test_safetensors_as_stored(family, name, tmp_path):
    model = rounded_model(family, DTYPES[name])
    model.to(DTYPES[name]).save_pretrained(tmp_path)
    packed = packed_runner(tmp_path, "with the CPU's instructions", weights="as-stored")
    assert forms_of(packed) == {name}
    assert_logits_equal(packed, model.float(), amx.available())


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_are_rounded_to_int8_by_default(family, tmp_path):
    model = rounded_model(family, torch.bfloat16)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    packed = packed_runner(tmp_path, "with the CPU's instructions")
    assert forms_of(packed) == {"Q8_0"}
    assert_logits_equal(packed, model.float(), int8_weights=True)


@pytest.mark.skipif(not amx.available(), reason="2026-11-23: products in bfloat16 need AMX")
def test_floats_are_multiplied_in_bfloat16_for_any_number_of_tokens(tmp_path):
    """So the bits of a token do not depend on the tokens beside it."""
    model = rounded_model("llama", torch.bfloat16)
    write_gguf(model, tmp_path / "m.gguf", "BF16")
    packed, tokens = packed_runner(tmp_path / "m.gguf", "with the CPU's instructions"), text(40, 0)
    single = all_logits(packed, tokens)
    step = torch.cat([run(packed, [(tokens, range(40), i, 1, i)])[0] for i in range(40)])
    assert torch.equal(step, single)
