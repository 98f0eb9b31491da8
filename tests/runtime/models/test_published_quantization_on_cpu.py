"""Quantized safetensors on the packed CPU kernels: which form is chosen, what `plait check` says, and the logits."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantized_checkpoints import CASES, save_quantized
from tiny_hf_models import all_logits, runner, text, transformers_logits

from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
from plait.runtime.models.quantization import choose_weight_format
from plait.runtime.weights.checkpoint import open_checkpoint

PACKED = ("GPTQ 4, groups of 32, symmetric", "AWQ", "GPTQ 8, one group", "MXFP4", "W4A16, act-order", "NF4, nested")


@pytest.mark.parametrize("name", PACKED)
def test_packed_logits_are_those_of_the_dequantized_model(tmp_path: Path, name: str) -> None:
    """Within the rounding of activations to 8 bits; what the weights are is tested in test_published_formats.py."""
    model = save_quantized(tmp_path, CASES[name])
    loaded = runner(tmp_path, dtype="bfloat16")
    assert isinstance(loaded, PackedCpuRunner)
    tokens = text(20, 5)
    ours, expected = all_logits(loaded, tokens), transformers_logits(model, tokens)
    assert float((ours - expected).norm() / expected.norm()) < 0.04


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("AWQ", "the folder's own weights (AWQ, 4 bits in groups of 64), held as Q5_0, BF16, packed"),
        (
            "W4A16, act-order",
            "the folder's own weights (compressed-tensors, int4 in groups of 64), held as BF16; "
            "14 of 14 quantized matrices have no such form and are rounded to 16 bits, packed",
        ),
    ],
)
def test_plait_check_says_how_the_weights_are_held(tmp_path: Path, name: str, reason: str) -> None:
    save_quantized(tmp_path, CASES[name])
    weights = open_checkpoint(tmp_path)
    assert choose_weight_format(weights, "bfloat16", "cpu", "auto").reason.startswith(reason)
    chosen = choose_weight_format(weights, "float32", "cpu", "auto")
    assert not chosen.packed and chosen.weight_format == "bf16"
    assert chosen.reason.startswith(f"float32, dequantized from {weights.quantization}, multiplied by torch: ")
    rounded = choose_weight_format(weights, "bfloat16", "cpu", "int4").reason
    assert rounded.startswith("weights with more bits (") and "rounded to int4" in rounded
