"""The launches of one layer, repeated for the others, are those that each layer would make itself."""

from __future__ import annotations

import pytest
import torch
import triton_device as kernel_device
from attention_cases import FP8, Layer, layout_of, on, tensors

from plait.kernels.kv_cache import LayerCache
from plait.kernels.operators import AttentionLayer
from plait.kernels.triton.attention import paged
from plait.kernels.triton.attention.layer_launches import LayerLaunches
from plait.kernels.triton.kernel_launch import KernelLaunch

DEVICE = str(kernel_device.DEVICE)
ROWS = [(1, 150), (20, 30), (1, 140), (1, 3), (0, 0)]
GROUPS = [([0, 2], 128)]
MODELS = {
    "layers of one kind": (None, [(None, None)] * 3),
    "windows in turn": (None, [(7, None), (None, None)] * 2),
    "a soft cap in one layer": (None, [(None, None), (None, 2.0), (None, None)]),
    "fp8": (FP8, [(None, None)] * 2),
    "int8": (torch.int8, [(None, None)] * 2),
}


def layers_of(dtype, kinds, pages):
    """Layers with random caches of their own."""
    layers = []
    for seed, (window, softcap) in enumerate(kinds):
        inputs = tensors(Layer(cache=dtype), 1, pages, DEVICE, seed)
        cache = LayerCache(*(inputs[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale")))
        layers.append(AttentionLayer(cache, 0.125, window, softcap))
    return layers


@pytest.mark.parametrize(("model", "groups"), [("layers of one kind", []), *((model, GROUPS) for model in MODELS)])
def test_every_layer_has_the_bits_of_its_own_launches(model, groups, monkeypatch):
    layout, pages = layout_of(ROWS, groups=groups)
    layers, layout = layers_of(*MODELS[model], pages), on(DEVICE, layout)
    q = tensors(Layer(), len(layout.positions), 1, DEVICE)["q"]
    shapes = [paged.attention_shape_of(q, layer.cache.k, layer.window) for layer in layers]
    layout = paged.with_plans(layout, *dict.fromkeys(shapes))
    out, made = torch.empty_like(q), []
    launches = LayerLaunches(layers)(q, layout, out)
    monkeypatch.setattr(paged, "decode_launch", counted(paged.decode_launch, made))
    found = []
    for launch in launches:
        out.fill_(float("nan"))
        launch()
        found.append(out.clone())
    assert len(made) == len(set(MODELS[model][1])), "launches are prepared once for each kind of layer"
    for layer, attended in zip(layers, found, strict=True):
        assert torch.equal(attended, paged.attend(q, layer, layout))
    assert not torch.equal(found[0], found[-1])


def counted(prepare, made):
    def prepare_and_count(*arguments) -> KernelLaunch:
        made.append(prepare(*arguments))
        return made[-1]

    return prepare_and_count
