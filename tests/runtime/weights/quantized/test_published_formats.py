"""Checkpoints in every published quantization format: their numbers, their forms, and logits in float32."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from quantized_checkpoints import CASES, save_quantized
from tiny_hf_models import all_logits, runner, text, transformers_logits

from plait.kernels.quantized_matrix import QuantizedMatrix, dequantize
from plait.runtime.weights.checkpoint import open_checkpoint


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_logits_are_those_of_the_format(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = save_quantized(tmp_path, case)
    weights = open_checkpoint(tmp_path)
    layouts = set()
    for parameter, expected in model.named_parameters():
        stored_type, rows, shape = weights.raw_blocks(parameter)
        assert shape == tuple(expected.shape)
        values = weights.float32_array(parameter)
        np.testing.assert_allclose(values, expected.detach(), rtol=2e-7, atol=0)
        assert torch.equal(weights.tensor(parameter, torch.float32, "cpu"), torch.from_numpy(values))
        if weights.is_quantized(parameter):
            layouts.add(stored_type)
            held = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[stored_type]).reshape(shape)
            rounded = torch.from_numpy(values).bfloat16().float().numpy() if stored_type == "BF16" else values
            np.testing.assert_array_equal(held, rounded)
            grid, codes = weights.grid(parameter), weights.codes(parameter, "cpu")
            assert grid is not None and codes.shape == shape
            np.testing.assert_array_equal(dequantize(QuantizedMatrix(grid, codes.numpy())), values)
        else:
            assert stored_type == "BF16" and weights.grid(parameter) is None
    assert layouts == {case.layout}
    tokens = text(24, 3)
    ours = all_logits(runner(tmp_path), tokens)
    torch.testing.assert_close(ours, transformers_logits(model, tokens), atol=1e-4, rtol=1e-4)
