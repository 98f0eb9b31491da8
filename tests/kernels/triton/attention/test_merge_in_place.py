"""The splits of a decode row are merged by the last one to finish; layers of one forward pass share their plan."""

from __future__ import annotations

import pytest
import torch
import triton_device as kernel_device
from attention_cases import Layer, attention_layer, close, expected, layout_of, on, tensors

from plait.kernels.triton.attention import cascade, decode, paged, split_kv_plan
from plait.kernels.triton.attention import inputs as attention_inputs
from plait.kernels.triton.attention.tile_config import GpuSpec

DEVICE = str(kernel_device.DEVICE)
SMALL_GPU = GpuSpec(90, 4)


@pytest.mark.parametrize("groups", [(), [([0, 2], 128)]], ids=["no prefix", "shared prefix"])
def test_two_layers_merge_over_one_plan(monkeypatch, groups):
    for module in (paged, cascade, decode, attention_inputs, split_kv_plan):
        monkeypatch.setattr(module, "gpu_spec", lambda device: SMALL_GPU)
    layout, pages = layout_of([(1, 600), (1, 40), (2, 400)], groups=groups, max_q_len=2)
    layer = Layer(4, 2, 64, torch.float32)
    shape = paged.AttentionShape(8, 2, 64, torch.float32)
    layout = paged.with_plans(on(DEVICE, layout), shape)
    plan = layout.plans[0]
    counts = plan.row_item_starts.diff().tolist()
    assert counts[0] > 1 and counts[1] == 1
    for seed in (1, 2):
        inputs = tensors(layer, len(layout.positions), pages, DEVICE, seed)
        output = paged.attend(inputs["q"], attention_layer(layer, inputs), layout)
        close(output, expected(layer, inputs, layout), layer.dtype)
        assert not plan.arrivals.any()
