"""MTP layers: hidden states and logits of the published forward, the model beside them, and layers that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_hf_models import all_logits, randomized, runner, transformers_logits, write_gguf
from tiny_llama_checkpoints import save_tiny_llama
from tiny_mtp_models import HEAD_DIM, KV_HEADS, LAYERS, SIZE, reference_hidden_states, save_mimo

from plait.runtime.errors import CorruptModel, InputError, UnsupportedModel
from plait.runtime.models.draft_heads.head import HeadRow
from plait.runtime.models.draft_heads.mtp import load_mtp
from plait.runtime.process.draft_files import draft_bytes, open_mtp
from plait.runtime.weights.checkpoint import open_checkpoint

TOKENS = [5, 9, 30, 2, 2, 17, 41, 8, 11, 20, 3, 46]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder, the model of transformers, and the tensors of the MTP layer."""
    folder = tmp_path_factory.mktemp("mimo")
    return folder, *save_mimo(folder)


def stream(model, tokens):
    """The residual stream behind the last layer, float64 [T, C]."""
    found = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    hook.remove()
    return found[0].double().numpy()


def entries(head, joined, tokens):
    """The head's outputs of a text in parts, beside another text: two chunks of states of the model, two of its own."""
    cache, other, outputs = head.new_cache(), head.new_cache(), []
    for begin, end in ((0, 6), (6, 9), (9, 10), (10, 11)):
        hidden = joined[begin:end] if begin < 9 else outputs[-1][-1:]
        rows = [HeadRow(other, tokens[:3], joined[:3], 7), HeadRow(cache, tokens[begin:end], hidden, begin)]
        outputs.append(head.forward(rows)[3:])
    return np.concatenate(outputs)


def test_logits_are_those_of_the_published_layer(saved):
    folder, model, tensors = saved
    states, embedding = stream(model, TOKENS), model.model.embed_tokens.weight.detach().double().numpy()
    expected = reference_hidden_states(tensors, embedding, states, TOKENS, num_own=2)
    output = model.lm_head.weight.detach().numpy()
    head = load_mtp(open_mtp(folder), open_checkpoint(folder), lambda hidden: hidden @ output.T, 512)
    outputs = entries(head, head.join(states.astype(np.float32)), np.array(TOKENS[1:], np.int32))
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    np.testing.assert_allclose(head.logits(outputs), expected @ output.T, atol=1e-4)
    assert np.abs(expected).max() > 0.5 and head.config.captured == (LAYERS,)
    assert head.config.layer.context_length == 512


def test_states_and_logits_come_from_the_packed_model(saved):
    folder, model, tensors = saved
    packed = runner(folder, dtype="bfloat16", weights="int8")
    packed.capture([LAYERS])
    all_logits(packed, TOKENS)
    states = packed.captured.copy()
    exact = stream(model, TOKENS)
    assert np.linalg.norm(states - exact) < 0.05 * np.linalg.norm(exact)
    head = load_mtp(open_mtp(folder), open_checkpoint(folder), packed.model.logits, 512)
    outputs = entries(head, states, np.array(TOKENS[1:], np.int32))
    embedding = model.model.embed_tokens.weight.detach().double().numpy()
    expected = reference_hidden_states(tensors, embedding, exact, TOKENS, 2) @ model.lm_head.weight.detach().numpy().T
    assert np.linalg.norm(head.logits(outputs) - expected) < 0.1 * np.linalg.norm(expected)


def test_the_model_beside_an_mtp_layer_is_qwen_2(saved):
    folder, model, _ = saved
    expected = transformers_logits(model, TOKENS)
    torch.testing.assert_close(all_logits(runner(folder), TOKENS), expected, atol=1e-4, rtol=1e-4)


def test_a_missing_layer_is_only_missed_where_it_drafts(tmp_path):
    model, _ = save_mimo(tmp_path, remove=["input_proj.weight"])
    torch.testing.assert_close(
        all_logits(runner(tmp_path), TOKENS), transformers_logits(model, TOKENS), atol=1e-4, rtol=1e-4
    )
    with pytest.raises(CorruptModel, match=r"draft: .*no tensor 'model.mtp_layers.0.input_proj.weight'"):
        open_mtp(tmp_path)


@pytest.mark.parametrize(
    ("changes", "config", "error", "told"),
    [
        ({"input_proj.weight": torch.zeros(SIZE, SIZE)}, {}, CorruptModel, r"input_proj.weight' .*\(64, 64\), .*128"),
        ({"self_attn.k_proj.bias": torch.zeros(3)}, {}, CorruptModel, "self_attn.k_proj.bias"),
        ({"final_layernorm.weight": torch.zeros(SIZE, dtype=torch.int32)}, {}, UnsupportedModel, "final_lay.* I32"),
        ({}, {"num_nextn_predict_layers": 2}, InputError, "draft: .*has 2 .num_nextn_predict_layers"),
        ({}, {"num_nextn_predict_layers": 0}, InputError, "draft: .*has 0 .num_nextn_predict_layers"),
        ({}, {"num_nextn_predict_layers": "x"}, CorruptModel, "num_nextn_predict_layers"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(tmp_path, changes, config, error, told):
    save_mimo(tmp_path, changes, **config)
    with pytest.raises(error, match=told):
        load_mtp(open_mtp(tmp_path), open_checkpoint(tmp_path), lambda hidden: hidden, 512)


def test_models_without_mtp_layers_are_refused(tmp_path):
    model = randomized(save_tiny_llama(tmp_path))
    write_gguf(model, tmp_path / "m.gguf")
    for path in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(InputError, match="draft: 'mtp' needs a model with one MTP layer; this one has 0"):
            open_mtp(path)


def test_memory_is_that_of_texts_and_float32_weights(saved):
    folder, _, tensors = saved
    states, caches = 2048 * SIZE * 4, 2 * 8192 * 2 * KV_HEADS * HEAD_DIM * 4
    assert draft_bytes("mtp", folder) == states + caches + 4 * sum(tensor.size for tensor in tensors.values())
