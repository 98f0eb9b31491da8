"""Adapters on the Triton operators, in the interpreter: against peft, and over quantized weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference_low_rank
import torch
import triton_device as kernel_device
from family_cases import FAMILY_CASES
from quantized_checkpoints import CASES, save_quantized
from tiny_adapters import make_adapter, outer_targets_of, run_with, targets_of
from tiny_hf_models import randomized, relative_error, run, text, transformers_logits, write_gguf

from plait.kernels.triton.operators import triton_kernels
from plait.runtime.config import engine_config
from plait.runtime.executor.torch_runner import TorchRunner

# (family, dtype, the largest relative difference); Phi-3's products are fused, and experts need 16 bits
FAMILIES = {
    "llama": ("float32", 1e-5),
    "gemma3": ("float32", 1e-5),
    "phi3": ("float32", 1e-5),
    "qwen3_moe": ("float16", 2e-2),
}


def on_triton(path, dtype, adapters, **settings):
    paths = {name: str(folder) for name, folder in adapters.items()}
    fields = dict(dtype=dtype, device=str(kernel_device.DEVICE), max_pages=256, max_batch_tokens=256, adapters=paths)
    return TorchRunner(engine_config(**fields | settings), path, kernels=triton_kernels(getattr(torch, dtype)))


@pytest.fixture(params=FAMILIES, scope="module")
def adapted(request, tmp_path_factory):
    """A model with adapters of 4, 4 with biases, and 40 ranks."""
    folder, (dtype, bound) = tmp_path_factory.mktemp("adapted"), FAMILIES[request.param]
    model = randomized(FAMILY_CASES[request.param].build())
    model.save_pretrained(folder / "base")
    merged = {
        "all": make_adapter(model, folder / "all", 1, lora_alpha=3),
        "biased": make_adapter(model, folder / "biased", 2, target_modules=targets_of(model)[:2], lora_bias=True),
        "outer": make_adapter(model, folder / "outer", 3, r=40, target_modules=outer_targets_of(model)),
    }
    ours = on_triton(folder / "base", dtype, {name: folder / name for name in merged})
    has_experts = request.param == "qwen3_moe"
    return SimpleNamespace(references={"": model, **merged}, ours=ours, bound=bound, has_experts=has_experts)


def test_rows_of_several_adapters_in_one_step_have_the_logits_of_peft(adapted):
    names, lengths = ["all", "", "outer", "biased", "all", ""], [9, 5, 12, 7, 2, 2]
    rows, page = [], 0
    for seed, (name, length) in enumerate(zip(names, lengths, strict=True)):
        rows.append((text(length, seed), range(page, page + length), 0, length, 0, name))
        page += length
    for (tokens, *_, name), logits in zip(rows, run_with(adapted.ours, rows), strict=True):
        expected = transformers_logits(adapted.references[name], tokens)
        assert relative_error(logits.float().cpu(), expected, adapted.has_experts) < adapted.bound, name


BASES = {
    "int8": ("base", "int8"),
    "Q5_0": ("model.gguf", "as-stored"),
    "fp8, blocks": ("", "as-stored"),
    "NF4, nested": ("", "as-stored"),
}


@pytest.mark.skipif(not kernel_device.INTERPRETED, reason="the reference reads the host's memory (2026-11-29)")
@pytest.mark.parametrize("form", BASES)
def test_updates_over_quantized_weights_are_those_of_the_reference(form, tmp_path, monkeypatch):
    """What adapters change is added to the products with the weights as they are."""
    name, weight_format = BASES[form]
    if not name:
        model = save_quantized(tmp_path / "base", CASES[form])
    else:
        model = randomized(FAMILY_CASES["llama"].build(hidden_size=128, intermediate_size=192))
        model.save_pretrained(tmp_path / "base")
        write_gguf(model, tmp_path / "model.gguf", "Q5_0")
    make_adapter(model, tmp_path / "mine", 1, target_modules=[*targets_of(model), "lm_head"])
    make_adapter(model, tmp_path / "other", 2, r=24)
    adapters = {"mine": tmp_path / "mine", "other": tmp_path / "other"}
    ours = on_triton(tmp_path / (name or "base"), "float16", adapters, weights=weight_format)
    lengths, names = (9, 1, 20), ("mine", "other", "mine")
    rows = [(text(n, n), range(40 * i, 40 * i + n), 0, n, 0, names[i]) for i, n in enumerate(lengths)]
    found = run_with(ours, rows)
    by_reference = dict(group_rows=reference_low_rank.group_rows, add_low_rank=reference_low_rank.add_low_rank)
    monkeypatch.setattr(
        ours.adapter_slots, "_kernels", replace(ours.kernels, fused=replace(ours.kernels.fused, **by_reference))
    )
    for row, logits, expected in zip(rows, found, run_with(ours, rows), strict=True):
        (without,) = run(ours, [row[:-1]])
        assert relative_error(logits, expected) < 0.01 < relative_error(without, expected)
