"""Random weights in the blocks of every GGUF type that has a packed layout."""

from __future__ import annotations

import gguf
import numpy as np

from plait.kernels.cpu.gemm import packed_weights
from plait.kernels.cpu.gemm.layouts import LAYOUTS
from plait.kernels.cpu.gemm.packed_weights import StoredWeight

# Where a block has its float16 scale and minimum; the bytes around them may be anything.
FLOAT16_OFFSETS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
FLOAT16_OFFSETS |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))


def random_blocks(name: str, outputs: int, inputs: int, seed: int, magnitude: float = 0.01) -> np.ndarray:
    """Random bytes of a weight [outputs, inputs]: every quant and every small scale; float16 of `magnitude`."""
    rng, layout = np.random.default_rng(seed), LAYOUTS[name]
    if layout.is_float:
        values = (rng.normal(size=(outputs, inputs)) * magnitude).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    size = packed_weights.block_bytes(layout)
    blocks = rng.integers(0, 256, (outputs * inputs // layout.unit_inputs, size), dtype=np.uint8)
    for offset in FLOAT16_OFFSETS.get(name, (0,)):
        halves = (rng.normal(size=len(blocks)) * magnitude).astype(np.float16)
        blocks[:, offset : offset + 2] = halves[:, None].view(np.uint8)
    if name == "MXFP4":
        exponents = np.clip(128 + np.log2(magnitude) + rng.integers(-3, 4, len(blocks)), 0, 254)
        blocks[:, 0] = exponents.astype(np.uint8)
    return blocks.reshape(outputs, -1)


def random_weight(name: str, outputs: int, inputs: int, seed: int, magnitude: float = 0.01) -> StoredWeight:
    """A random weight [outputs, inputs]; `inputs` must be a multiple of the layout's `unit_inputs`."""
    return StoredWeight(random_blocks(name, outputs, inputs, seed, magnitude), LAYOUTS[name])


def dequantized_weight(weight: StoredWeight) -> np.ndarray:
    """The weight [O, C] in float32, as the gguf package dequantizes it."""
    return gguf.quants.dequantize(weight.rows, gguf.GGMLQuantizationType[weight.layout.name])
