"""EAGLE-3 heads: logits of the paper's forward, the hidden states of the model, and heads that do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_eagle3_heads import DRAFT_VOCAB, HEAD_DIM, KV_HEADS, SIZE, reference_logits, save_head
from tiny_hf_models import randomized, run, runner
from tiny_llama_checkpoints import save_tiny_llama

from plait.runtime.errors import CorruptModel, InputError, ModelNotFound, UnsupportedModel
from plait.runtime.models.draft_heads.eagle3_config import head_cache_bytes
from plait.runtime.models.draft_heads.eagle3_loading import load_eagle3
from plait.runtime.models.draft_heads.head import HeadRow
from plait.runtime.weights.checkpoint import open_checkpoint

TOKENS = [5, 9, 30, 2, 2, 17, 41, 8, 11, 20, 3, 46]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    randomized(save_tiny_llama(folder, num_hidden_layers=5, head_dim=32, max_position_embeddings=512)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


def model_config(model):
    return type("Config", (), json.loads((model / "config.json").read_text()))


@pytest.mark.parametrize(("embedding", "norms_residual"), [(True, False), (False, False), (True, True)])
def test_logits_are_those_of_the_paper(model, checkpoint, tmp_path, embedding, norms_residual):
    changes = {"eagle_config": {"norm_before_residual": True}} if norms_residual else {}
    tensors = save_head(tmp_path, model_config(model), embedding=embedding, **changes)
    tensors.setdefault("embed_tokens.weight", torch.from_numpy(checkpoint.float32_array("model.embed_tokens.weight")))
    head = load_eagle3(tmp_path, checkpoint, 512)
    states = torch.randn(len(TOKENS), 3 * SIZE, generator=torch.Generator().manual_seed(1))
    expected = reference_logits(tensors, states, TOKENS, 2, norms_residual).numpy()
    # The same in parts, beside another text: two chunks of hidden states of the model, then two of the head's own.
    cache, other, logits = head.new_cache(), head.new_cache(), []
    tokens = np.array(TOKENS[1:], np.int32)
    joined = head.join(states.numpy())
    for begin, end in ((0, 6), (6, 9), (9, 10), (10, 11)):
        hidden = joined[begin:end] if begin < 9 else out[-1:]  # noqa: F821
        rows = [HeadRow(other, tokens[:3], joined[:3], 7), HeadRow(cache, tokens[begin:end], hidden, begin)]
        out = head.forward(rows)[3:]
        logits.append(head.logits(out))
    of_model = np.full((11, 48), -np.inf, np.float32)
    of_model[:, np.arange(DRAFT_VOCAB) + tensors["d2t"].numpy()] = expected
    np.testing.assert_allclose(np.concatenate(logits), of_model, atol=1e-4)
    assert np.abs(expected).max() > 0.5


def test_large_activations_do_not_overflow(model, checkpoint, tmp_path):
    signs = torch.tensor([50.0, -50.0]).repeat(48)
    gate = {"midlayer.mlp.gate_proj.weight": signs[:, None].repeat(1, SIZE)}
    tensors = save_head(tmp_path, model_config(model), tensors=gate)
    head, states = load_eagle3(tmp_path, checkpoint, 512), torch.randn(4, 3 * SIZE)
    with np.errstate(all="raise", under="ignore"):
        row = HeadRow(head.new_cache(), np.array(TOKENS[1:5], np.int32), head.join(states.numpy()), 0)
        logits = head.logits(head.forward([row]))
    expected, ids = reference_logits(tensors, states, TOKENS[:5]).numpy(), tensors["d2t"].numpy()
    np.testing.assert_allclose(logits[:, ids + np.arange(DRAFT_VOCAB)], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("captured", [[1, 4], [5], [0, 3, 5]])
def test_the_model_hands_out_the_states_before_layers(model, captured):
    packed = runner(model, dtype="bfloat16", weights="int8", max_pages=400, max_batch_tokens=300)
    text = TOKENS * 20  # more than a partition of rows
    rows = [(text[:200], range(200), 0, 200, 199), (TOKENS, range(200, 212), 0, 12, 11)]
    before = run(packed, rows)
    packed.capture(captured)
    after = run(packed, rows)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(before, after, strict=True))
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = {}
    for index, module in enumerate([*reference.model.layers, reference.model.norm]):
        module.register_forward_pre_hook(lambda _, args, index=index: inputs.setdefault(index, []).append(args[0][0]))
    with torch.no_grad():
        for row in rows:
            reference(torch.tensor([row[0]]))
    expected = torch.cat([torch.cat(inputs[layer]) for layer in captured], -1)
    states = torch.from_numpy(packed.captured.copy())
    assert states.shape == expected.shape
    assert (states - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"vocab_size": 50}, InputError, "vocab_size 50, not 48"),
        ({"target_hidden_size": 32}, InputError, "target_hidden_size 32, not 64"),
        ({"num_hidden_layers": 2}, InputError, "num_hidden_layers 2, not 1"),
        ({"attention_bias": True}, InputError, "attention_bias"),
        ({"norm_before_residual": 3}, CorruptModel, "norm_before_residual"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}}, InputError, "has 5; the model has 5"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, InputError, "must be 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, InputError, "has 4; the model has 5 layers"),
        ({"eagle_config": "x"}, CorruptModel, "eagle_config"),
        ({"head_dim": "x"}, CorruptModel, "draft: the model's head_dim is 'x'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, InputError, "use_aux_hidden_state"),
        ({"draft_vocab_size": 32}, InputError, "lm_head.weight of the EAGLE-3 head has shape"),
        (
            {"tensors": {"fc.weight": torch.zeros(SIZE, 2 * SIZE)}},
            InputError,
            r"fc.weight .*\(64, 128\), not \(64, 192\)",
        ),
        ({"tensors": {"norm.weight": torch.zeros(SIZE, dtype=torch.int32)}}, UnsupportedModel, "norm.weight .*I32"),
        ({"tensors": {"midlayer.x.weight": torch.zeros(1)}}, UnsupportedModel, "midlayer.x.weight"),
        ({"tensors": {"d2t": torch.full((DRAFT_VOCAB,), 9)}}, CorruptModel, "d2t"),
        ({"tensors": {"d2t": torch.zeros(3, dtype=torch.int64)}}, InputError, "d2t"),
        ({"tensors": {"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.bfloat16)}}, InputError, "d2t .*type BF16.* I64"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(model, checkpoint, tmp_path, changes, error, told):
    save_head(tmp_path, model_config(model), **changes)
    with pytest.raises(error, match=told):
        load_eagle3(tmp_path, checkpoint, 512)


@pytest.mark.parametrize(
    ("stated", "layers"),
    [(None, (2, 2, 2)), ([2, 3, 4], (2, 3, 4)), ([1, 2, 3], (2, 3, 4)), ([4, 1, 2], (4, 1, 2)), ([0, 1, 4], (0, 1, 4))],
)
@pytest.mark.parametrize("place", ["eagle_config", None])
def test_layers_are_stated_by_input_or_by_output(model, checkpoint, tmp_path, stated, layers, place):
    ids = {"eagle_aux_hidden_state_layer_ids": stated}
    save_head(tmp_path, model_config(model), **({place: ids} if place else ids))
    assert load_eagle3(tmp_path, checkpoint, 512).config.captured == layers


def test_a_head_for_any_context_has_tables_for_the_texts_it_reads(model, checkpoint, tmp_path):
    save_head(tmp_path, model_config(model), max_position_embeddings=1 << 30)
    config = load_eagle3(tmp_path, checkpoint, 512).config
    assert config.layer.context_length == 512


def test_memory_is_that_of_texts_and_widened_weights(model, tmp_path):
    save_head(tmp_path, model_config(model))
    states, caches = 2048 * 3 * SIZE * 4, 2 * 8192 * 2 * KV_HEADS * HEAD_DIM * 4
    files = (tmp_path / "model.safetensors").stat().st_size
    assert head_cache_bytes(tmp_path, 8192) == states + caches + files
    save_head(tmp_path, model_config(model), head_dim="64")
    with pytest.raises(CorruptModel, match="draft: the model's head_dim is '64'"):
        head_cache_bytes(tmp_path, 8192)


def test_damaged_and_missing_files_are_refused(model, checkpoint, tmp_path):
    save_head(tmp_path, model_config(model))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptModel, match="truncated or damaged"):
        load_eagle3(tmp_path, checkpoint, 512)
    weights.unlink()
    with pytest.raises(ModelNotFound, match=r"model.safetensors"):
        load_eagle3(tmp_path, checkpoint, 512)
