"""GGUF's K forms on the GPU operators: numbers as the gguf package dequantizes them, and products."""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_weights import random_blocks
from triton_device import DEVICE, close_enough

from plait.kernels.k_weights import KWeight, dequantize_k, k_weight_from_gguf
from plait.kernels.quantized_weights import concat_outputs, select_outputs
from plait.kernels.reference import matmul as reference
from plait.kernels.triton.linear import quantized_linear

FORMS = ("Q4_K", "Q5_K", "Q6_K")
MAGNITUDE = 0.0004  # of the float16 scales
forms = st.sampled_from(FORMS)


def weight_of(form: str, outs: int, channels: int, seed: int) -> tuple[KWeight, torch.Tensor]:
    """A weight, and its numbers by the gguf package."""
    blocks = random_blocks(form, outs, channels, seed, MAGNITUDE)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[form]).reshape(outs, channels)
    return k_weight_from_gguf(torch.from_numpy(blocks).to(DEVICE), form, (outs, channels)), torch.from_numpy(expected)


@settings(max_examples=15, deadline=None)
@given(forms, st.sampled_from([1, 65, 130]), st.sampled_from([256, 768]), st.integers(0, 999))
def test_numbers_are_those_of_the_file(form: str, outs: int, channels: int, seed: int) -> None:
    weight, expected = weight_of(form, outs, channels, seed)
    assert torch.equal(dequantize_k(weight).cpu(), expected)
    ids = torch.tensor([outs - 1, 0, outs // 2], dtype=torch.int32, device=DEVICE)
    chosen = expected[ids.cpu().long()]
    for rows in (reference.dequantize_rows, quantized_linear.dequantize_rows):
        torch.testing.assert_close(rows(weight, ids, torch.float32).cpu(), chosen, rtol=1e-6, atol=1e-7)
    both = concat_outputs([weight, weight])
    assert isinstance(both, KWeight) and torch.equal(dequantize_k(both).cpu(), torch.cat([expected, expected]))
    some = select_outputs(both, ids)
    assert isinstance(some, KWeight) and torch.equal(dequantize_k(some).cpu(), chosen)


@settings(max_examples=12, deadline=None)
@given(forms, st.integers(1, 70), st.sampled_from([1, 65, 130]), st.sampled_from([256, 1024]), st.integers(0, 999))
def test_products_are_those_of_the_dequantized_weight(
    form: str, rows: int, outs: int, channels: int, seed: int
) -> None:
    weight, expected = weight_of(form, outs, channels, seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float16 if seed % 2 else torch.bfloat16
    x = torch.randn((rows, channels), generator=generator).to(dtype).to(DEVICE)
    bias = torch.randn(outs, generator=generator).to(dtype).to(DEVICE)
    exact, scale = x.float() @ expected.to(DEVICE).T + bias.float(), channels**0.5
    for product in (reference.make_linear()(x, weight, bias), quantized_linear.linear(x, weight, bias)):
        torch.testing.assert_close(product.float() / scale, exact / scale, **close_enough(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_the_path_for_many_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "MAX_FUSED_DEQUANT_ROWS", 8)
    monkeypatch.setattr(quantized_linear, "DEQUANT_CHUNK_ELEMENTS", 70 * 256)
    weight, _ = weight_of(form, 150, 256, 1)
    x = torch.randn((9, 256), generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    few = quantized_linear.linear(x[:8], weight)
    torch.testing.assert_close(quantized_linear.linear(x, weight)[:8] / 16, few / 16, **close_enough(torch.float16))


def test_other_forms_and_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="Q3_K are no K form"):
        k_weight_from_gguf(torch.zeros(110, dtype=torch.uint8), "Q3_K", (1, 256))
    with pytest.raises(ValueError, match="143 bytes"):
        k_weight_from_gguf(torch.zeros(143, dtype=torch.uint8), "Q4_K", (1, 256))
    weights = [weight_of(form, 8, 256, 0)[0] for form in ("Q4_K", "Q6_K")]
    with pytest.raises(ValueError, match="cannot be stacked"):
        concat_outputs(weights)
