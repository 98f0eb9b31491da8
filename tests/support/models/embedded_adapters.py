"""Random LoRA adapters of the embedded model."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

from plait.runtime.model_files.locate import locate_model
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")


def write_adapter(folder, seed, rank=8):
    """A random adapter of the embedded model, strong enough to change what it says."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in expected_shapes(open_checkpoint(locate_model(None)).config).items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            down, up = (rng.normal(size=size).astype(np.float32) for size in ((rank, shape[1]), (shape[0], rank)))
            tensors[f"base_model.model.{module}.lora_A.weight"] = down / np.sqrt(shape[1], dtype=np.float32)
            tensors[f"base_model.model.{module}.lora_B.weight"] = 0.3 * up
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
