"""Adapters against peft: the logits of its merged models, on every family, alone and many in one step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from family_cases import FAMILY_CASES, GGUF_CASES, MODEL_CASES, case_id
from tiny_adapters import make_adapter, outer_targets_of, run_with, targets_of, write_gguf_adapter
from tiny_hf_models import randomized, runner, text, transformers_logits, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(params=MODEL_CASES, ids=case_id, scope="module")
def adapted(request, tmp_path_factory):
    """A model with three adapters of other ranks, scales and modules, in plait and merged by peft."""
    family, variant = request.param
    model, folder = randomized(FAMILY_CASES[family].build(variant)), tmp_path_factory.mktemp("adapted")
    model.save_pretrained(folder / "base")
    targets = targets_of(model)
    merged = {
        "all": make_adapter(model, folder / "all", 1, lora_alpha=3),
        "some": make_adapter(
            model,
            folder / "some",
            2,
            target_modules=targets[:2],
            rank_pattern={targets[0]: 2, r"layers\.1\." + r"self_attn\." + targets[1]: 7},
            alpha_pattern={targets[1]: 11},
            use_rslora=True,
        ),
        "outer": make_adapter(model, folder / "outer", 3, target_modules=outer_targets_of(model)),
    }
    ours = runner(folder / "base", adapters={name: str(folder / name) for name in merged})
    return SimpleNamespace(references={"": model, **merged}, ours=ours)


@pytest.mark.parametrize("name", ["", "all", "some", "outer"])
def test_a_text_has_the_logits_of_the_merged_model(adapted, name):
    tokens = text(40, 0)
    (ours,) = run_with(adapted.ours, [(tokens, range(40), 0, 40, 0, name)])
    assert_close(ours, transformers_logits(adapted.references[name], tokens))


def test_rows_of_several_adapters_in_one_step_do_not_meet(adapted):
    """Prompts and decoding rows of no, one and another adapter, in an order that mixes them."""
    names = ["all", "", "some", "outer", "all", "", "outer", "some"]
    lengths = [9, 5, 1, 7, 12, 1, 1, 4]
    rows, page = [], 0
    for seed, (name, length) in enumerate(zip(names, lengths, strict=True)):
        tokens, pages = text(20 + length, seed), range(page, page + 20 + length)
        page += 20 + length
        run_with(adapted.ours, [(tokens, pages, 0, 20, 19, name)])
        rows.append((tokens, pages, 20, length, 20, name))
    for (tokens, *_, name), logits in zip(rows, run_with(adapted.ours, rows), strict=True):
        assert_close(logits, transformers_logits(adapted.references[name], tokens)[20:])


@pytest.mark.parametrize(("family", "variant"), GGUF_CASES, ids=map(case_id, GGUF_CASES))
def test_adapters_and_models_may_each_be_gguf_files(family, variant, tmp_path):
    model = randomized(FAMILY_CASES[family].build(variant))
    targets = [*targets_of(model), "embed_tokens", *([] if model.config.tie_word_embeddings else ["lm_head"])]
    merged = make_adapter(model, tmp_path / "peft", 1, lora_alpha=3, target_modules=targets)
    write_gguf(model, tmp_path / "base.gguf")
    model.save_pretrained(tmp_path / "base")
    write_gguf_adapter(model, tmp_path / "peft", tmp_path / "adapter.gguf")
    adapters = {"peft": str(tmp_path / "peft"), "gguf": str(tmp_path / "adapter.gguf")}
    tokens, digests = text(30, 0), []
    for base in ("base.gguf", "base") if family != "mistral" else ["base.gguf"]:  # as GGUF it is a "llama"
        ours = runner(tmp_path / base, weights="bf16", adapters=adapters)
        digests += ours.adapter_pool.names.values()
        for name in adapters:
            (logits,) = run_with(ours, [(tokens, range(30), 0, 30, 0, name)])
            assert_close(logits, transformers_logits(merged, tokens))
    assert len(set(digests)) == 1, "the numbers are the same, so cached KV is"


def test_bits_of_a_deterministic_row_do_not_depend_on_others(tmp_path):
    """A BLAS sums in an order that it chooses by the number of rows, here those of one adapter."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8}
    model = randomized(LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)))
    model.save_pretrained(tmp_path / "base")
    make_adapter(model, tmp_path / "mine", 1, r=64)
    ours = runner(tmp_path / "base", deterministic=True, adapters={"mine": str(tmp_path / "mine")})
    rows = []
    for seed, length in enumerate((1, 5, 1, 9, 17)):
        pages = range(40 * seed, 40 * seed + 18)
        tokens = text(length, seed)
        rows.append((tokens, pages, 0, length, 0, "mine"))
    for row, logits in zip(rows, run_with(ours, rows), strict=True):
        assert torch.equal(run_with(ours, [row])[0], logits)
