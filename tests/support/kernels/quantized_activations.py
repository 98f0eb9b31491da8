"""Activations as the CPU's packed products read them, created and read back by torch."""

from __future__ import annotations

import numpy as np
import torch

from plait.kernels.cpu.kernel_types import QuantizedActivations
from plait.kernels.cpu.parallel.threads import COUNTER_STRIDE


def counters(phases: int = 1) -> np.ndarray:
    """The phase counters of a step."""
    return np.zeros((phases, 2 * COUNTER_STRIDE), np.int64)


def empty_int8(rows: int, channels: int) -> QuantizedActivations:
    """Zeroed activations in int8."""
    scales, block_sums = (np.zeros((rows, channels // 32), np.float32) for _ in range(2))
    return QuantizedActivations(
        np.zeros((rows, channels), np.int8),
        scales,
        block_sums,
        np.zeros(scales.shape, np.int32),
        np.zeros((0, channels), np.uint16),
    )


def empty_bf16(rows: int, channels: int) -> QuantizedActivations:
    """Activations in bfloat16, all NaN until they are written."""
    bits = torch.full((rows + -rows % 16, channels), float("nan"), dtype=torch.bfloat16).view(torch.uint16).numpy()
    return empty_int8(rows, channels)._replace(bf16_tiles=bits[:rows])


def dequantized(x: QuantizedActivations) -> torch.Tensor:
    """Int8 activations as float32 [T, C]."""
    quants = torch.from_numpy(x.quants).float().unflatten(1, (-1, 32))
    return (quants * torch.from_numpy(x.scales)[..., None]).flatten(1)


def _tiles(x: QuantizedActivations) -> torch.Tensor:
    """The bfloat16 tiles [T / 16, C / 32, 16, 32], the padding rows included."""
    rows, channels = x.bf16_tiles.shape
    memory = x.bf16_tiles.base if len(x.bf16_tiles.base) > rows else x.bf16_tiles
    return torch.from_numpy(memory).view(torch.bfloat16).view(-1, channels // 32, 16, 32)


def bf16_values(x: QuantizedActivations) -> torch.Tensor:
    """Bfloat16 activations [T, C]."""
    return _tiles(x).transpose(1, 2).reshape(-1, x.bf16_tiles.shape[1])[: len(x.bf16_tiles)]


def from_bf16(values: torch.Tensor) -> QuantizedActivations:
    """Activations from bfloat16 [T, C]."""
    rows, channels = values.shape
    activations = empty_bf16(rows, channels)
    padded = torch.full((rows + -rows % 16, channels), float("nan"), dtype=torch.bfloat16)
    padded[:rows] = values
    _tiles(activations).copy_(padded.view(-1, 16, channels // 32, 32).transpose(1, 2))
    return activations


def random_int8(rows: int, channels: int, seed: int) -> QuantizedActivations:
    """Random activations, quantized by torch as the kernels do it."""
    x = torch.randn(rows, channels // 32, 32, generator=torch.Generator().manual_seed(seed))
    scales = x.abs().amax(-1) / 127
    quants = (x / scales[..., None]).round()
    block_sums = (quants.sum(-1) * scales).numpy().astype(np.float32)
    return empty_int8(rows, channels)._replace(
        quants=quants.flatten(1).to(torch.int8).numpy(),
        scales=scales.numpy(),
        block_sums=block_sums,
        half_sums=half_sums(quants),
    )


def activations_of(quants: np.ndarray) -> QuantizedActivations:
    """Int8 activations of these quants [T, C], all scales being 1."""
    rows, channels = quants.shape
    blocks = torch.from_numpy(quants.astype(np.int64)).unflatten(1, (-1, 32))
    return empty_int8(rows, channels)._replace(
        quants=quants.astype(np.int8),
        scales=np.ones((rows, channels // 32), np.float32),
        block_sums=blocks.sum(-1).numpy().astype(np.float32),
        half_sums=half_sums(blocks),
    )


def half_sums(quants: torch.Tensor) -> np.ndarray:
    """The sums of both halves of blocks [T, C / 32, 32], as int32 of two int16."""
    sums = quants.unflatten(-1, (2, 16)).sum(-1).to(torch.int16).numpy()
    return np.ascontiguousarray(sums).view(np.int32)[..., 0]


def assert_close_int8(out: QuantizedActivations, expected: torch.Tensor, slack: float | torch.Tensor = 1e-4) -> None:
    """Asserts that int8 activations are within half a step plus `slack`, and that the block sums match the quants."""
    steps = torch.from_numpy(out.scales).repeat_interleave(32, dim=1)
    error = (dequantized(out) - expected).abs()
    assert (error <= 0.501 * steps + slack).all()
    assert (
        (torch.from_numpy(np.abs(out.quants)).unflatten(1, (-1, 32)).amax(-1) >= 126)
        .logical_or(torch.from_numpy(out.scales) == 0)
        .all()
    )
    assert np.array_equal(out.half_sums, half_sums(torch.from_numpy(out.quants).unflatten(1, (-1, 32))))
    torch.testing.assert_close(
        torch.from_numpy(out.block_sums), dequantized(out).unflatten(1, (-1, 32)).sum(-1), atol=1e-4, rtol=1e-4
    )
