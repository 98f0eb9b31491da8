"""Weights in GGUF's K forms with 4 to 6 bits: their memory layout for GPU kernels, and dequantization.

Nothing is rounded: the small integer scales of 32 or 16 inputs and the float16 scales of 256 stay apart, as in files.
The codes' lowest 4 bits lie as in `Int4Weight`. A byte of the higher bits has those of inputs 32 apart, the lowest
first: bit b, or bits 2 b and 2 b + 1, of byte j belong to input 32 b + j of 256, or of 128, inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES, k_scales_and_minima, unpack_bits

SUPERBLOCK = 256
K_BITS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
Q6_OFFSET = 32  # the code of the weight 0


@dataclass(frozen=True)
class KWeight:
    """A weight [N, K]: superscale * scale * code - superminimum * minimum, or superscale * scale * (code - 32)."""

    low: torch.Tensor  # [K / 64, N, 32] uint8
    high: torch.Tensor | None  # uint8: None with 4 bits, [K / 256, N, 32] with 5, [K / 128, N, 32] with 6
    scales: torch.Tensor  # [K / 32, N] uint8, or [K / 16, N] int8 with 6 bits
    minima: torch.Tensor | None  # [K / 32, N] uint8; None with 6 bits
    superscales: torch.Tensor  # [K / 256, N] float16
    superminima: torch.Tensor | None  # like superscales

    @property
    def out_features(self) -> int:
        return self.low.shape[1]

    @property
    def in_features(self) -> int:
        return len(self.low) * 64

    @property
    def high_bits(self) -> int:
        """The bits of a code beyond 4."""
        return 0 if self.high is None else 1 if self.minima is not None else 2

    def with_outputs(self, fields: dict[str, torch.Tensor | None]) -> KWeight:
        """The same form with other tensors."""
        return replace(self, **fields)  # type: ignore[arg-type]


def k_weight_from_gguf(raw: torch.Tensor, quantization: str, shape: tuple[int, int]) -> KWeight:
    """Repacks blocks `raw` (uint8) of Q4_K, Q5_K or Q6_K of a weight [N, K]. ValueError for other types or sizes."""
    outputs, inputs = shape
    size = GGUF_BLOCK_SHAPES[quantization][1] if quantization in K_BITS else 0
    if not size or inputs % SUPERBLOCK or raw.numel() != outputs * inputs // SUPERBLOCK * size:
        raise ValueError(f"{raw.numel()} bytes of {quantization} are no K form of shape {shape}")
    blocks = raw.reshape(-1, size)  # [N K / 256, size]

    def by_output(values: torch.Tensor, width: int = 1) -> torch.Tensor:
        """[N K / 256, B] as [K ..., N, width], or [K ..., N] for the width 1."""
        columns = values.reshape(outputs, -1, width).transpose(0, 1).contiguous()
        return columns if width > 1 else columns[..., 0].contiguous()

    def halves(at: int) -> torch.Tensor:
        return by_output(blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16))

    if quantization == "Q6_K":
        codes = unpack_bits(blocks[:, :128], 4, 64).reshape(len(blocks), -1, 2, 32)
        scales = blocks[:, 192:208].clone(memory_format=torch.contiguous_format).view(torch.int8)
        low = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(len(blocks), -1)
        return KWeight(
            by_output(low, 32), by_output(blocks[:, 128:192], 32), by_output(scales), None, halves(208), None
        )
    scales, minima = k_scales_and_minima(blocks)
    high, low = (blocks[:, 16:48], blocks[:, 48:]) if quantization == "Q5_K" else (None, blocks[:, 16:])
    return KWeight(
        by_output(low, 32),
        None if high is None else by_output(high, 32),
        by_output(scales),
        by_output(minima),
        halves(0),
        halves(2),
    )


def dequantize_k(weight: KWeight) -> torch.Tensor:
    """Returns the float32 weight [N, K]."""
    outputs, inputs = weight.out_features, weight.in_features
    spans = torch.stack([weight.low & 15, weight.low >> 4], dim=2)  # [K / 64, N, 2, 32]
    codes = spans.permute(1, 0, 2, 3).reshape(outputs, inputs)
    if weight.high is not None:
        width = weight.high_bits
        parts = [(weight.high >> (width * i)) & (2**width - 1) for i in range(8 // width)]
        codes = codes | torch.stack(parts, dim=2).permute(1, 0, 2, 3).reshape(outputs, inputs) << 4

    def of_inputs(values: torch.Tensor) -> torch.Tensor:
        return values.float().T.repeat_interleave(inputs // len(values), dim=1)

    scales = of_inputs(weight.superscales) * of_inputs(weight.scales)
    if weight.minima is None or weight.superminima is None:
        return scales * (codes.float() - Q6_OFFSET)
    return scales * codes.float() - of_inputs(weight.superminima) * of_inputs(weight.minima)
