"""Random blocks of GGUF's quantized formats, for the tests of GPU kernels: without the packages of the CPU's."""

from __future__ import annotations

import torch
from triton_device import DEVICE

from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES

FLOAT16_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q5_0": (0,)}  # others: at 0 and 2


def random_blocks(name: str, outs: int, channels: int, seed: int) -> torch.Tensor:
    """Blocks of random bytes whose float16 fields are small numbers of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values, size = GGUF_BLOCK_SHAPES[name]
    blocks = torch.randint(0, 256, (outs * channels // values, size), dtype=torch.uint8, generator=generator)
    for at in FLOAT16_AT.get(name, (0, 2)):
        numbers = torch.randn(len(blocks), 1, generator=generator) * (0.0005 if values == 256 else 0.02)
        blocks[:, at : at + 2] = numbers.half().view(torch.uint8)
    return blocks.to(DEVICE)
