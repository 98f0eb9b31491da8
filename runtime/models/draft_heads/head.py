"""The forward pass of a draft head, with NumPy in float32.

The entry of position i takes the hidden state of the model there, and the embedding of the token behind it; the output
guesses the token at position i + 2. Where the model has not computed the position yet, the head's own output of the
entry before takes the place of the joined hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from plait.runtime.arrays import Float32Array, IntArray
from plait.runtime.models.draft_heads.config import HeadConfig
from plait.runtime.models.loading.rope_tables import build_rope_tables

FIRST_CAPACITY = 64  # entries of a new cache
EmbeddingRows = Callable[[IntArray], Float32Array]  # [n] -> [n, C]


class HeadCache:
    """Keys and values of the entries of one text, [size, G, D] each."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self.size = 0
        self._kv = np.empty((2, FIRST_CAPACITY, num_heads, head_dim), np.float32)

    def append(self, keys: Float32Array, values: Float32Array) -> tuple[Float32Array, Float32Array]:
        """Appends keys and values [n, G, D]; returns those of all entries."""
        end = self.size + len(keys)
        while end > self._kv.shape[1]:
            self._kv = np.concatenate([self._kv, np.empty_like(self._kv)], axis=1)
        self._kv[0, self.size : end], self._kv[1, self.size : end] = keys, values
        self.size = end
        return self._kv[0, :end], self._kv[1, :end]


class HeadRow(NamedTuple):
    """New entries of one text: their tokens [n], hidden states [n, C], and the position of the first one."""

    cache: HeadCache
    tokens: IntArray
    hidden: Float32Array
    position: int


class DraftHead:
    """What heads have in common: one layer. Each says what enters it, and how its output becomes logits.

    tensors: float32 by name in the layer. embed: rows of the embedding.
    """

    def __init__(self, config: HeadConfig, tensors: Mapping[str, Float32Array], embed: EmbeddingRows) -> None:
        self.config = config
        self._tensors, self._embed = tensors, embed
        ((self._cos, self._sin),) = build_rope_tables(config.layer)

    def new_cache(self) -> HeadCache:
        """Returns an empty cache."""
        return HeadCache(self.config.layer.num_kv_heads, self.config.layer.head_dim)

    def join(self, states: Float32Array) -> Float32Array:
        """Joins the captured hidden states [n, captured C] of the model to hidden states [n, C] of the head."""
        return states

    def forward(self, rows: Sequence[HeadRow]) -> Float32Array:
        """Returns the hidden states [sum of n, C] of the new entries; writes keys and values."""
        embedded = self._embed(np.concatenate([row.tokens for row in rows]))
        residual, x = self._layer_inputs(embedded, np.concatenate([row.hidden for row in rows]))
        q, k, v = (self._project(x, f"self_attn.{name}_proj") for name in "qkv")
        attended, begin = np.empty_like(q), 0
        for row in rows:
            part = slice(begin, begin + len(row.tokens))
            attended[part] = self._attend(row, q[part], k[part], v[part])
            begin = part.stop
        residual = residual + self._project(attended, "self_attn.o_proj")
        h = self._norm(residual, "post_attention_layernorm")
        gate = self._project(h, "mlp.gate_proj")
        silu = gate * (1 + np.tanh(gate / 2)) / 2  # without an exponential, which overflows
        inner = silu * self._project(h, "mlp.up_proj")
        result: Float32Array = residual + self._project(inner, "mlp.down_proj")
        return result

    def logits(self, hidden: Float32Array) -> Float32Array:
        """Returns logits [n, V] of hidden states [n, C] of `forward`, which the caller may change."""
        raise NotImplementedError

    def _layer_inputs(self, embedded: Float32Array, hidden: Float32Array) -> tuple[Float32Array, Float32Array]:
        """Returns the residual [n, C] and the input of q, k and v [n, ...] of embeddings and hidden states [n, C]."""
        raise NotImplementedError

    def _attend(self, row: HeadRow, q: Float32Array, k: Float32Array, v: Float32Array) -> Float32Array:
        """Attention of new entries, with grouped heads; returns [n, H D]."""
        layer, count = self.config.layer, len(q)
        groups, size = layer.num_kv_heads, layer.head_dim
        positions = slice(row.position, row.position + count)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        num_before = row.cache.size
        keys, values = row.cache.append(
            _rotated(k.reshape(count, groups, size), cos, sin), v.reshape(count, groups, size)
        )
        q = _rotated(q.reshape(count, layer.num_heads, size), cos, sin)
        q = q.reshape(count, groups, -1, size).transpose(1, 2, 0, 3)  # [G, H / G, n, D]
        scores = q @ keys.transpose(1, 2, 0)[:, None] * np.float32(layer.softmax_scale)  # [G, H / G, n, entries]
        is_later = np.arange(len(keys)) > num_before + np.arange(count)[:, None]
        scores = np.where(is_later, np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = weights @ values.transpose(1, 0, 2)[:, None]  # [G, H / G, n, D]
        result: Float32Array = attended.transpose(2, 0, 1, 3).reshape(count, -1)
        return result

    def _project(self, x: Float32Array, name: str) -> Float32Array:
        result: Float32Array = x @ self._tensors[f"{name}.weight"].T
        bias = self._tensors.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _norm(self, x: Float32Array, name: str) -> Float32Array:
        squares = np.mean(np.square(x), axis=-1, keepdims=True)
        result: Float32Array = x / np.sqrt(squares + np.float32(self.config.layer.rms_norm_eps))
        return result * self._tensors[f"{name}.weight"]


def _rotated(x: Float32Array, cos: Float32Array, sin: Float32Array) -> Float32Array:
    """Rotary embeddings of x [n, heads, D]; cos and sin [n, 1, D / 2]."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
