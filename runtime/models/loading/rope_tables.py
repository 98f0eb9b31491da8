"""The tables of rotary position embeddings (arXiv:2104.09864), computed once for all positions of the context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.runtime.arrays import Float32Array
from plait.runtime.models.config import ModelConfig


def build_rope_tables(config: ModelConfig) -> list[tuple[Float32Array, Float32Array]]:
    """cos and sin [context_length, D / 2] float32 of complete heads, for each of `ModelConfig.rope_frequencies`."""
    return [_build_rope_table(config, frequencies, factor) for frequencies, factor in config.rope_frequencies()]


def _build_rope_table(
    config: ModelConfig, frequencies: Sequence[float], factor: float
) -> tuple[Float32Array, Float32Array]:
    positions = np.arange(config.context_length, dtype=np.float32)
    angles = np.outer(positions, np.array(frequencies, np.float32))
    unrotated = ((0, 0), (0, config.head_dim // 2 - len(frequencies)))  # pairs that do not rotate have angle 0
    cos = np.pad(np.cos(angles) * np.float32(factor), unrotated, constant_values=1.0)
    return cos, np.pad(np.sin(angles) * np.float32(factor), unrotated)
