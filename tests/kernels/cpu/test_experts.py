"""A mixture of experts in the packed decoder: the choice of experts, the weights that are read, NaN."""

from __future__ import annotations

import pytest
import torch
from family_cases import FAMILY_CASES
from tiny_hf_models import all_logits, randomized, run, runner, text

from plait.kernels.cpu import decoder_args
from plait.kernels.cpu.decoder import missing_features

EXPERTS, CHOSEN, TOKENS = 19, 3, 40
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-23: the kernels need AVX2")


@pytest.fixture(scope="module", params=[True, False], ids=["normalized", "not normalized"])
def model(request):
    sizes = dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=64, head_dim=32)
    sizes |= dict(num_hidden_layers=1, norm_topk_prob=request.param)
    return randomized(FAMILY_CASES["qwen3_moe"].build(**sizes))


@pytest.fixture
def packed(model, tmp_path):
    model.save_pretrained(tmp_path)
    return runner(tmp_path, dtype="bfloat16", weights="int8", max_pages=700)


def buffer(packed, entry):
    return packed.model._buffers[entry][:TOKENS]


def test_the_router_chooses_the_experts_of_transformers(model, packed):
    gate, routers = model.model.layers[0].mlp.gate, []
    hook = gate.register_forward_hook(lambda module, inputs, output: routers.append(inputs[0]))
    tokens = text(TOKENS, 2)
    all_logits(packed, tokens)
    with torch.no_grad():
        model(torch.tensor([tokens]))
        scores = torch.nn.functional.linear(routers[0].reshape(TOKENS, -1), gate.weight)
    hook.remove()
    shares = scores.softmax(-1)
    chosen = torch.from_numpy(buffer(packed, decoder_args.CHOSEN)).long()
    best, _ = shares.topk(CHOSEN)
    torch.testing.assert_close(shares.gather(1, chosen), best, rtol=0.05, atol=0.005)  # near ties may change places
    assert all(len(set(row)) == CHOSEN for row in chosen.tolist())
    weights = best / best.sum(-1, keepdim=True) if packed.config.experts.normalize_topk else best
    actual = torch.from_numpy(buffer(packed, decoder_args.WEIGHTS).copy())
    torch.testing.assert_close(actual, weights, rtol=0.05, atol=0.005)


def test_only_the_chosen_experts_are_read(packed):
    tokens = text(1, 4)
    logits = all_logits(packed, tokens)
    chosen = set(packed.model._buffers[decoder_args.CHOSEN][0].tolist())
    layer = packed.model.weights.layers[0]
    for weight in (layer.gate_up, layer.down):
        of_experts = weight.data.reshape(EXPERTS, -1)
        for expert in set(range(EXPERTS)) - chosen:
            of_experts[expert] = 0xFF  # scales that are NaN
    assert torch.equal(all_logits(packed, tokens), logits)
    layer.down.data.reshape(EXPERTS, -1)[min(chosen)] = 0xFF
    assert not torch.isfinite(all_logits(packed, tokens)).any()


def test_a_token_that_is_not_finite_leaves_the_others_alone(model, tmp_path):
    broken, embedding = text(1, 6)[0], model.model.embed_tokens.weight
    before = embedding.detach().clone()
    with torch.no_grad():
        embedding[broken] = torch.nan
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        embedding.copy_(before)
    packed = runner(tmp_path, dtype="bfloat16", weights="int8", max_pages=700, deterministic=True)
    tokens = [token for token in text(TOKENS, 5) if token != broken]
    count = len(tokens)
    rows = [([broken] * 9, range(300, 309), 0, 9, 0), (tokens, range(count), 0, count, 0)]
    not_finite, finite = run(packed, rows)
    assert torch.equal(finite, all_logits(packed, tokens))
    assert torch.isfinite(finite).all() and not torch.isfinite(not_finite).any()
