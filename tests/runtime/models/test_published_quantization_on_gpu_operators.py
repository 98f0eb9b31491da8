"""Quantized safetensors on the Triton operators, in the interpreter: how weights are held, and the logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton_device as kernel_device
from quantized_checkpoints import CASES, save_quantized
from tiny_hf_models import all_logits, text, transformers_logits

from plait.kernels.coded_weights import CodedWeight
from plait.kernels.quantized_weights import Float8Weight, Int8Weight
from plait.kernels.triton.linear import quantized_linear
from plait.kernels.triton.operators import triton_kernels
from plait.runtime.config import engine_config
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.models.quantization import choose_weight_format
from plait.runtime.weights.checkpoint import open_checkpoint

HELD = {
    "GPTQ 4, groups of 128, asymmetric": CodedWeight,
    "GPTQ 4, act-order": torch.Tensor,  # q, k and v have orders of their own here; o and down are held
    "GPTQ 8, asymmetric": torch.Tensor,
    "AWQ": CodedWeight,
    "fp8, blocks": Float8Weight,
    "W8A16": Int8Weight,
    "W8A8 fp8, tensor, static": Float8Weight,
    "W8A8 fp8, blocks": Float8Weight,
    "NF4, nested": CodedWeight,
    "MXFP4": CodedWeight,
}


def on_triton(path: Path, **settings: str) -> TorchRunner:
    config = engine_config(**{"dtype": "float16", "device": str(kernel_device.DEVICE), "max_pages": 64} | settings)
    return TorchRunner(config, path, kernels=triton_kernels(torch.float16))


@pytest.mark.parametrize("name", HELD)
def test_weights_are_held_as_stored(tmp_path: Path, name: str) -> None:
    model = save_quantized(tmp_path, CASES[name])
    ours, tokens = on_triton(tmp_path), text(12, 4)
    assert ours.weight_format == "as-stored"
    layer = ours.model.layers[0]
    assert type(layer.attention.qkv[0]) is HELD[name]
    assert type(layer.attention.output[0]) is (CodedWeight if "act-order" in name else HELD[name])
    assert isinstance(ours.model.head, torch.Tensor)  # lm_head is not quantized
    expected = transformers_logits(model, tokens)
    difference = all_logits(ours, tokens).float().cpu() - expected
    assert float(difference.norm() / expected.norm()) < 0.01


@pytest.mark.parametrize(
    ("name", "is_made_for_it"),
    [("fp8, blocks", True), ("fp8 of fbgemm", True), ("W8A8 fp8, channel", True), ("W8A8 fp8, blocks", False)],
)
def test_activations_are_rounded_as_the_checkpoint_says(
    tmp_path: Path, name: str, is_made_for_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of many tokens, with activations in float8 in all layers or in none: by the size of their error."""
    monkeypatch.setattr(quantized_linear, "MAX_WIDENED_FLOAT8_ROWS", 8)
    model = save_quantized(tmp_path, CASES[name])
    ours, tokens = on_triton(tmp_path), text(12, 4)
    expected = transformers_logits(model, tokens)
    error = float((all_logits(ours, tokens).float().cpu() - expected).norm() / expected.norm())
    assert 0.01 < error < 0.1 if is_made_for_it else error < 0.01
    few = float((all_logits(ours, tokens[:8]).float().cpu() - expected[:8]).norm() / expected[:8].norm())
    assert few < 0.01


def test_weights_are_dequantized_on_request(tmp_path: Path) -> None:
    model = save_quantized(tmp_path, CASES["AWQ"])
    ours, tokens = on_triton(tmp_path, weights="bf16"), text(12, 4)
    assert isinstance(ours.model.layers[0].mlp.down[0], torch.Tensor)
    expected = transformers_logits(model, tokens)
    assert float((all_logits(ours, tokens).float().cpu() - expected).norm() / expected.norm()) < 0.01


def test_the_choice_and_its_reason(tmp_path: Path) -> None:
    save_quantized(tmp_path, CASES["fp8, blocks"])
    weights = open_checkpoint(tmp_path)
    chosen = choose_weight_format(weights, "bfloat16", "cuda", "auto")
    assert chosen.weight_format == "as-stored" and not chosen.packed
    assert chosen.reason.startswith(
        "the folder's own: fp8, a scale per block of 128 x 128; activations in fp8 for many tokens"
    )
    wide = choose_weight_format(weights, "float32", "cuda", "auto")
    assert wide.weight_format == "bf16" and "dequantized from fp8" in wide.reason
