"""gpt-oss as published: experts in MXFP4, which transformers dequantizes; compared with the float model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from other_architectures import build_other
from safetensors.torch import save_file
from tiny_hf_models import all_logits, randomized, runner, text, transformers_logits

from plait.runtime.errors import UnsupportedModel

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def encode(
    rng: np.random.Generator, experts: int, outputs: int, inputs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(blocks [E, N, K / 32, 16], scales [E, N, K / 32], the weight [E, K, N] that they mean)."""
    codes = rng.integers(0, 16, (experts, outputs, inputs)).astype(np.uint8)
    scales = rng.integers(122, 126, (experts, outputs, inputs // 32)).astype(np.uint8)
    numbers = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)[codes]
    weight = numbers * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(experts, outputs, inputs // 32, 16)
    return blocks, scales, weight.transpose(0, 2, 1).astype(np.float32).copy()


def save_gpt_oss(folder: Path) -> torch.nn.Module:
    model = randomized(build_other("gpt_oss", hidden_size=64, intermediate_size=64))
    rng, tensors = np.random.default_rng(3), {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks, scales, weight = encode(rng, experts, outputs, inputs)
            parameter.data = torch.from_numpy(weight)
            tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        else:
            tensors[name] = parameter.data.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_logits_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    model, tokens = save_gpt_oss(tmp_path), text(20, 6)
    torch.testing.assert_close(
        all_logits(runner(tmp_path), tokens), transformers_logits(model, tokens), atol=1e-4, rtol=1e-4
    )


def test_an_unknown_field_is_refused_by_name(tmp_path: Path) -> None:
    save_gpt_oss(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["block_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"quantization_config\.block_size is unknown"):
        runner(tmp_path)
