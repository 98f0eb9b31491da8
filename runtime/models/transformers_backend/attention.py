"""Plait's paged attention as an attention implementation of transformers.

transformers calls the function registered under a name in `AttentionInterface` with the queries, keys and values of
one layer. Ours writes keys and values to plait's KV cache and attends to the pages of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.reference import ops
from plait.runtime.errors import UnsupportedModel

NAME = "plait_paged"
_STATE = "plait_paged_attention"  # the attribute of the model's modules that holds its PagedAttention


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer's KV: G heads, with Dk dimensions of keys and Dv of values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        """Values per token, keys included."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class PagedAttention:
    """The attention of all layers of one model over one KV cache.

    The shapes of the layers are recorded from a first forward pass, as configs do not state them uniformly. `caches`
    has one entry per layer, and `layout` describes the current batch; the caller sets both before the next pass.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # Triton's attention is part of fused operators, which apply rotary embeddings too; here the model has done so.
        on_cpu = device.type == "cpu"
        self._plain_attention = select_kernels(device, dtype).paged_attention if on_cpu else ops.paged_attention
        self._indices: dict[torch.nn.Module, int] = {}
        self.shapes: list[LayerShape] = []
        self.caches: list[LayerCache] = []
        self.layout: AttentionLayout | None = None

    def record(self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Records the layer of `module` and returns zeros. Shapes as in `attend`. Raises UnsupportedModel."""
        name = type(module).__name__
        if module in self._indices:
            raise UnsupportedModel(f"{name} attends twice in one layer; the paged attention stores one KV for a layer")
        if getattr(module, "is_causal", True) is not True:
            raise UnsupportedModel(f"{name} is not causal; plait runs decoders only")
        if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
            raise UnsupportedModel(
                f"{name} has {q.shape[1]} query, {k.shape[1]} key and {v.shape[1]} value heads; the paged attention "
                "needs as many keys as values, and a multiple of them as queries"
            )
        self._indices[module] = len(self.shapes)
        self.shapes.append(LayerShape(k.shape[1], k.shape[2], v.shape[2]))
        return q.new_zeros((*q.shape[:2], v.shape[2]))

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of q [T, H, Dk] after writing k [T, G, Dk] and v [T, G, Dv]; returns [T, H, Dv]."""
        if self.layout is None:
            return self.record(module, q, k, v)
        cache = self.caches[self._indices[module]]
        ops.write_kv(k, v, cache.k, cache.v, self.layout.write_slots)
        q = q.to(cache.k.dtype)
        if sinks is None and k.shape[2] == v.shape[2]:
            q = q.contiguous()
            return self._plain_attention(q, cache.k, cache.v, self.layout, scale, window, softcap=softcap)
        return ops.paged_attention(q, cache.k, cache.v, self.layout, scale, window, softcap=softcap, sinks=sinks)


def attach(model: torch.nn.Module, attention: PagedAttention) -> None:
    """Makes `attention` that of every layer of a transformers model, through transformers' attention interface."""
    from transformers import AttentionInterface

    from plait.runtime.models.transformers_backend.falcon import replace_attention

    AttentionInterface.register(NAME, paged_attention_forward)
    for module in model.modules():
        setattr(module, _STATE, attention)
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME
        replace_attention(module, paged_attention_forward)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: query [1, H, T, Dk], key [1, G, T, Dk], value [1, G, T, Dv].

    Returns [1, T, H, Dv]. The mask is None: transformers makes none for implementations without a mask function.
    """
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} has position biases, which the paged attention does not add")
    attention: PagedAttention = getattr(module, _STATE)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = _mask_window(module) if sliding_window is None else sliding_window
    out = attention.attend(module, q, k, v, scale, window, softcap, s_aux)
    return out[None].to(query.dtype), None


def _mask_window(module: torch.nn.Module) -> int | None:
    """The window of a layer that has one only in its mask, by the config's list of layer types."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types or index is None or layer_types[index] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
