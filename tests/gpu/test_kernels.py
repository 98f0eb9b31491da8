"""The Triton kernels other than attention on a GPU: shapes of real models, and capture in a CUDA graph.

On a machine with a GPU, tests/kernels/triton runs there too, at smaller sizes.
"""

from __future__ import annotations

import pytest
import reference_float32
import reference_matmul as matmul
import reference_sampling
import torch
from gguf_blocks import random_blocks

from plait.kernels import quantized_weights
from plait.kernels.coded_weights import CODE_BITS, weight_from_gguf
from plait.kernels.gguf_dequantize import dequantize as gguf_dequantize
from plait.kernels.quantized_weights import StackedWeight
from plait.kernels.sampling_inputs import LogitAdjustments, RowMasks, SamplingInputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU (since 2026-11-21)")

BF16 = torch.bfloat16


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def inputs(rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingInputs:
    floats = [torch.full((rows,), value, device="cuda") for value in (temperature, top_p, min_p)]
    ks = torch.full((rows,), top_k, dtype=torch.int32, device="cuda")
    seeds = torch.arange(rows, device="cuda") * 7919
    return SamplingInputs(floats[0], ks, floats[1], floats[2], seeds, seeds + 1)


SAMPLING_SETTINGS = [
    (0.0, -1, 1.0, 0.0),
    (1.0, -1, 1.0, 0.0),
    (1.0, -1, 0.9, 0.0),
    (0.7, 50, 0.95, 0.05),
    (4.0, -1, 0.9, 0.0),
]


@pytest.mark.parametrize("settings", SAMPLING_SETTINGS)
@pytest.mark.parametrize("vocab", [128_256, 262_144])
def test_sampled_tokens_equal_the_reference(settings: tuple[float, int, float, float], vocab: int) -> None:
    from plait.kernels.triton.sampling import sampler

    logits, rows = randn(200, vocab) * 3, inputs(200, *settings)
    words = torch.randint(-(2**31), 2**31, (100, -(-vocab // 32)), device="cuda").int()
    adjustments = LogitAdjustments(RowMasks(words, torch.arange(-100, 100, device="cuda").clamp(min=-1).int()))
    result = sampler.sample(logits, rows, adjustments)
    expected = reference_sampling.sample(logits, rows, adjustments)
    # The GPU's 2^x has an error of two units in the last place, so one draw may fall into the next token.
    assert int((result != expected).sum()) <= 1
    single_inputs = SamplingInputs(*(column[150:151].contiguous() for column in rows))
    single_adjustments = LogitAdjustments(RowMasks(words, torch.tensor([50], dtype=torch.int32, device="cuda")))
    assert sampler.sample(logits[150:151], single_inputs, single_adjustments).item() == result[150].item()


def test_sampling_and_logprobs_in_a_captured_graph() -> None:
    from plait.kernels.triton.sampling import logprobs, sampler

    logits, rows = randn(8, 128_256), inputs(8, 1.0, -1, 0.9, 0.0)
    out = torch.empty(8, dtype=torch.int32, device="cuda")
    work = sampler.SamplingWorkspace.allocate(8, 128_256, logits.device)
    row_indices = torch.arange(8, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        sampler.sample(logits, rows, out=out, workspace=work)
        return logprobs.gather_logprobs(logits, row_indices, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = step()
    for seed in range(3):
        logits.copy_(randn(8, 128_256, seed=seed + 10) * 3)
        rows.step.add_(1)
        graph.replay()
        again = sampler.sample(logits, rows)
        assert torch.equal(out, again)
        torch.testing.assert_close(
            chosen, reference_sampling.gather_logprobs(logits, row_indices, again), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 2048])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_quantized_matmul_equals_the_reference(rows: int, dtype: torch.dtype) -> None:
    from plait.kernels.triton.linear import coded_matmul, quantized_matmul

    dense, x = randn(6144, 4096, dtype=torch.float32), randn(rows, 4096, dtype=dtype, seed=1)
    for group in (32, 128):
        for with_minima in (False, True):
            int4 = quantized_weights.quantize_int4(dense, group, with_minima=with_minima)
            result, expected = coded_matmul.coded_matmul(x, int4), matmul.coded_matmul(x, int4)
            assert relative_error(result, expected) < 3e-3
    int8 = quantized_weights.quantize_int8(dense)
    assert relative_error(quantized_matmul.int8_matmul(x, int8), matmul.int8_matmul(x, int8)) < 3e-3


@pytest.mark.parametrize("rows", [1, 17, 65, 600])
@pytest.mark.parametrize("name", CODE_BITS)
def test_gguf_blocks_are_multiplied_and_dequantized(name: str, rows: int) -> None:
    from plait.kernels.triton.linear import quantized_linear

    blocks, shape = random_blocks(name, 6144, 4096, 0), (6144, 4096)
    weight, values, x = weight_from_gguf(blocks, name, shape), gguf_dequantize(blocks, name, shape), randn(rows, 4096)
    ids = torch.tensor([6143, 0, 77], dtype=torch.int32, device="cuda")
    assert relative_error(quantized_linear.dequantize_rows(weight, ids, BF16), values[ids.long()]) < 3e-3
    expected = x.float() @ values.to(BF16).float().T
    assert relative_error(quantized_linear.linear(x, weight), expected) < 3e-3
    stacked = StackedWeight((weight, values[:99].to(BF16)))
    assert relative_error(quantized_linear.linear(x, stacked), torch.cat([expected, expected[:, :99]], dim=1)) < 3e-3


@pytest.mark.parametrize("rows", [1, 64, 200, 600])
def test_quantized_linear_layers_in_a_captured_graph(rows: int) -> None:
    from plait.kernels.triton.linear import quantized_linear

    dense = randn(6144, 4096, dtype=torch.float32)
    scales = (randn(4096 // 32, 6144, dtype=torch.float32, seed=1).abs() / 50).half()
    int8 = quantized_weights.quantize_int8(dense)
    for weight in (
        quantized_weights.quantize_int4(dense, 32, with_minima=True),
        int8,
        quantized_weights.Int8Weight(int8.values, scales),
        weight_from_gguf(random_blocks("Q6_K", 6144, 4096, 0), "Q6_K", (6144, 4096)),
    ):
        x, ids = randn(rows, 4096), torch.zeros(rows, dtype=torch.int32, device="cuda")

        def layer(module, product, weight=weight, x=x, ids=ids) -> tuple[torch.Tensor, torch.Tensor]:
            return product(x, weight, None), module.dequantize_rows(weight, ids, BF16)

        layer(quantized_linear, quantized_linear.linear)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(quantized_linear, quantized_linear.linear)
        x.copy_(randn(rows, 4096, seed=2))
        ids.copy_(torch.arange(rows, device="cuda") * 7)
        graph.replay()
        product, chosen = layer(matmul, matmul.make_linear())
        assert relative_error(result[0], product) < 5e-3
        assert torch.equal(result[1], chosen)


@pytest.mark.parametrize("tokens", [1, 64, 2048])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (8, 2)])
def test_an_expert_layer_in_a_captured_graph(tokens: int, experts: int, top_k: int) -> None:
    from plait.kernels.triton import activation
    from plait.kernels.triton.linear import grouped_matmul

    hidden, inner = 1024, 512
    first, second = randn(experts, 2 * inner, hidden), randn(experts, hidden, inner, seed=1)
    x, ids = randn(tokens, hidden, seed=2), torch.empty(tokens, top_k, dtype=torch.int32, device="cuda")
    routing_weights = randn(tokens, top_k, seed=3, dtype=torch.float32).softmax(-1)

    def layer(module, gate) -> torch.Tensor:
        routing = module.sort_by_expert(ids, experts, grouped_matmul.routing_block_size(ids.numel(), experts))
        gated = gate(module.grouped_matmul(x, first, routing, top_k))
        return module.combine_experts(module.grouped_matmul(gated, second, routing, 1), routing_weights, ids)

    def choose(seed: int) -> None:
        ids.copy_(randn(tokens, experts, seed=seed).topk(top_k).indices)

    choose(4)
    layer(grouped_matmul, activation.silu_and_multiply)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(grouped_matmul, activation.silu_and_multiply)
    for seed in (5, 6):
        choose(seed)
        graph.replay()
        assert relative_error(result, layer(matmul, reference_float32.silu_and_multiply)) < 5e-3


def test_norms_and_activations_of_8192_rows() -> None:
    from plait.kernels.triton import activation, norm

    x, residual, weight = randn(8192, 5120), randn(8192, 5120, seed=1), randn(5120, seed=2)
    residual_copy, expected_residual = residual.clone(), residual.clone()
    result = norm.add_rms_norm(x, residual_copy, weight, 1e-5)
    assert relative_error(result, reference_float32.add_rms_norm(x, expected_residual, weight, 1e-5)) < 3e-3
    assert torch.equal(residual_copy, expected_residual)
    gate_up = randn(8192, 2 * 13824)
    for name in ("silu_and_multiply", "gelu_tanh_and_multiply"):
        assert relative_error(getattr(activation, name)(gate_up), getattr(reference_float32, name)(gate_up)) < 3e-3
