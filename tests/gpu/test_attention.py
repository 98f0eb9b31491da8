"""The attention kernels on a GPU: sizes that the interpreter is too slow for, and capture in a CUDA graph.

On a machine with a GPU, tests/kernels/triton runs there too, instead of in the interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import FP8, Layer, attention_layer, close, expected, i32, layout_of, offsets_of, on, tensors

from plait.kernels.layout import AttentionLayout, AttentionShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU (since 2026-11-21)")
BF16, F16 = torch.bfloat16, torch.float16
LAYERS = {
    "Llama 3": Layer(4, 8, 128, BF16),
    "Qwen 2": Layer(7, 4, 128, F16),
    "SmolLM2": Layer(3, 3, 64, BF16),
    "Gemma 2": Layer(2, 4, 256, BF16, window=512, softcap=50.0),
    "Phi": Layer(1, 8, 80, F16),
    "fp8": Layer(4, 8, 128, BF16, cache=FP8),
    "int8": Layer(16, 2, 128, BF16, cache=torch.int8),
}
BATCHES = {
    "one long row": [(1, 20000)],
    "a full batch": [(1, 300 + 17 * i) for i in range(64)],
    "ragged": [(1, 9000), (1, 3), (3, 700), (0, 0), (1, 0)],
    "prompts": [(700, 0), (64, 1000), (1, 0), (333, 77)],
    "mixed": [(1, 5000), (512, 512), (1, 40), (2, 2000), (0, 0)],
    "drafts": [(5, 3000), (8, 100), (1, 60)],
}


def run(layer: Layer, inputs: dict, layout: AttentionLayout, **more) -> torch.Tensor:
    from plait.kernels.triton.attention.paged import attend

    return attend(inputs["q"], attention_layer(layer, inputs), layout, **more)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", LAYERS)
def test_attention_equals_the_reference(name: str, batch: str, page_size: int) -> None:
    layer = LAYERS[name]
    layout, pages = layout_of(BATCHES[batch], page_size)
    layout = on("cuda", layout)
    inputs = tensors(layer, len(layout.positions), pages * page_size, "cuda")
    reference = expected(layer, inputs, layout)
    close(run(layer, inputs, layout), reference, layer.dtype)
    close(run(layer, inputs, layout, deterministic=True), reference, layer.dtype)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_shared_prefixes_equal_the_reference(name: str, page_size: int) -> None:
    layer = LAYERS[name]
    rows = [(1, 2000 + 10 * i) for i in range(24)] + [(1, 900), (1, 650), (100, 30)]
    layout, pages = layout_of(rows, page_size, [(list(range(24)), 2000), ([24, 25], 640)])
    layout = on("cuda", layout)
    inputs = tensors(layer, len(layout.positions), pages * page_size, "cuda")
    close(run(layer, inputs, layout), expected(layer, inputs, layout), layer.dtype)


@pytest.mark.parametrize("batch", ["a full batch", "prompts", "mixed"])
@pytest.mark.parametrize("name", LAYERS)
def test_repeated_launches_have_the_bits_of_each_layers_own(name: str, batch: str) -> None:
    from plait.kernels.kv_cache import LayerCache
    from plait.kernels.operators import AttentionLayer
    from plait.kernels.triton.attention import paged
    from plait.kernels.triton.attention.layer_launches import LayerLaunches

    layer = LAYERS[name]
    layout, pages = layout_of(BATCHES[batch])
    caches = [tensors(layer, len(layout.positions), pages, "cuda", seed) for seed in range(3)]
    q, layout, layers = caches[0]["q"], on("cuda", layout), []
    for inputs, window in zip(caches, (layer.window, 64, layer.window), strict=True):
        cache = LayerCache(*(inputs[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale")))
        layers.append(AttentionLayer(cache, layer.dim**-0.5, window, layer.softcap))
    shapes = [paged.attention_shape_of(q, layer.cache.k, layer.window) for layer in layers]
    planned, out = paged.with_plans(layout, *dict.fromkeys(shapes)), torch.empty_like(q)
    for launch, own in zip(LayerLaunches(layers)(q, planned, out), layers, strict=True):
        out.fill_(float("nan"))
        launch()
        new = layout.q_starts[-1]
        assert torch.equal(out[:new], paged.attend(q, own, layout)[:new])


@pytest.mark.parametrize("name", ["Llama 3", "Gemma 2", "fp8"])
def test_a_captured_graph_reads_the_lengths_of_each_replay(name: str) -> None:
    """One graph of four rows is replayed for three batches; the last has a padding row."""
    from plait.kernels.triton.attention.split_kv_plan import allocate_plan, fill_plan

    layer, page_size, size = LAYERS[name], 16, 4
    shape = AttentionShape(layer.group * layer.kv_heads, layer.kv_heads, layer.dim, layer.cache or layer.dtype)
    shape = replace(shape, window=layer.window)
    inputs = tensors(layer, size, 3000 * page_size, "cuda")
    starts, kv_pages = i32(range(size + 1), "cuda"), i32([0] * 3000, "cuda")
    static = AttentionLayout(
        starts, starts.clone(), kv_pages, starts[1:].clone(), starts[1:].clone(), page_size, starts.clone(), max_q_len=1
    )
    plan = allocate_plan(shape, size, torch.device("cuda"))
    static = replace(static, plans=(plan,))

    def step() -> torch.Tensor:
        fill_plan(plan, static)
        return run(layer, inputs, static)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([5, 6, 7, 8], [20000, 1, 64, 300], [900, 10000, 3000, 0]):
        rows = [(1, length - 1) if length else (0, 0) for length in lengths]
        layout = on("cuda", layout_of(rows, page_size)[0])
        real = len(layout.positions)
        static.q_starts.copy_(layout.q_starts)
        static.kv_starts.copy_(i32(offsets_of(lengths), "cuda"))
        static.kv_pages[: len(layout.kv_pages)] = layout.kv_pages
        static.page_starts.copy_(layout.page_starts)
        graph.replay()
        close(out[:real], expected(layer, {**inputs, "q": inputs["q"][:real]}, layout), layer.dtype)


def test_caches_of_more_than_2_to_the_31_elements() -> None:
    """The offsets of the used slots need 64 bits."""
    layer, slots = Layer(4, 8, 128, BF16), (2**31 // (8 * 128)) + 4096
    layout, _ = layout_of([(1, 900), (40, 20)])
    layout = on("cuda", replace(layout, kv_pages=layout.kv_pages + slots - 2000))
    inputs = tensors(layer, 41, 2000, "cuda")
    for name in ("k_cache", "v_cache"):
        large = torch.empty((slots, 8, 128), dtype=BF16, device="cuda")
        large[-2000:] = inputs[name]
        inputs[name] = large
    close(run(layer, inputs, layout), expected(layer, inputs, layout), BF16)
