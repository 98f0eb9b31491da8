"""Adapters in the packed CPU decoder: as close to peft's merged models as the model alone is to transformers'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from family_cases import FAMILY_CASES, case_id
from tiny_adapters import ATTENTION, make_adapter, outer_targets_of, run_with
from tiny_hf_models import has_experts, randomized, relative_error, runner, text, transformers_logits

from plait.kernels.cpu.decoder import CpuDecoder, missing_features

SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=400)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
MODELS = {
    case_id((family, variant)): (case.model_class, settings)
    for family, case in FAMILY_CASES.items()
    for variant, settings in case.packed_variants.items()
}
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-28: the kernels need AVX2")


@pytest.fixture(params=MODELS, scope="module")
def adapted(request, tmp_path_factory):
    kind, more = MODELS[request.param]
    model, folder = randomized(kind(kind.config_class(**SHAPE | more))), tmp_path_factory.mktemp("adapted")
    model.save_pretrained(folder / "base")
    modules = [name for name in ("qkv_proj", *ATTENTION) if any(name in known for known, _ in model.named_modules())]
    merged = {
        "all": make_adapter(model, folder / "all", 1),
        "some": make_adapter(model, folder / "some", 2, r=7, use_rslora=True, target_modules=modules[:2]),
        "outer": make_adapter(model, folder / "outer", 3, target_modules=outer_targets_of(model)),
    }
    adapters = {name: str(folder / name) for name in merged}
    ours = runner(folder / "base", dtype="bfloat16", weights="int8", max_pages=700, adapters=adapters)
    assert isinstance(ours.model, CpuDecoder)
    return SimpleNamespace(references={"": model, **merged}, ours=ours, has_experts=has_experts(model))


def test_logits_are_as_close_to_merged_models_as_those_of_the_model_alone(adapted):
    tokens, errors = text(60, 0), {}
    for name, reference in adapted.references.items():
        (logits,) = run_with(adapted.ours, [(tokens, range(60), 0, 60, 0, name)])
        errors[name] = relative_error(logits, transformers_logits(reference, tokens), adapted.has_experts)
        if name:
            unadapted = transformers_logits(adapted.references[""], tokens)
            assert relative_error(logits, unadapted, adapted.has_experts) > 3 * errors[name]
    assert max(errors["all"], errors["some"], errors["outer"]) < 2 * errors[""] + 0.01, errors


def test_bits_of_a_row_do_not_depend_on_the_adapters_of_others(adapted):
    """Prompts and decoding rows, beside others of no, the same and another adapter."""
    texts = [text(20 + length, seed) for seed, length in enumerate((9, 1, 1, 7, 30, 1, 1, 4))]
    names, rows, page = ["all", "", "some", "outer", "all", "", "outer", "some"], [], 0
    for tokens, name in zip(texts, names, strict=True):
        rows.append((tokens, range(page, page + len(tokens)), 20, len(tokens) - 20, 20, name))
        run_with(adapted.ours, [(tokens, range(page, page + len(tokens)), 0, 20, 19, name)])
        page += len(tokens)
    together = run_with(adapted.ours, rows)
    for row, logits in zip(rows, together, strict=True):
        assert torch.equal(run_with(adapted.ours, [row, rows[0]])[0], logits)
