"""The sizes that draft heads have in common, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass

from plait.runtime.models.config import ModelConfig

MAX_WAITING = 2048  # positions, of all texts, whose hidden states are kept until a guess
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class HeadConfig:
    """A head's sizes.

    layer: of its only layer, with the model's vocabulary. model_size: of the model's hidden states. captured: the
    layers of the model before which the residual stream is read, in the order in which the head joins them.
    """

    layer: ModelConfig
    model_size: int
    captured: tuple[int, ...]


def cache_bytes(layer: ModelConfig, num_tokens: int, states_size: int) -> int:
    """Returns the bytes of so many tokens' keys and values, and of waiting hidden states [states_size] of positions.

    Caches grow by doubling, so half of one may be free.
    """
    keys_and_values = 2 * num_tokens * 2 * layer.num_kv_heads * layer.head_dim
    return (keys_and_values + MAX_WAITING * states_size) * FLOAT32_BYTES
