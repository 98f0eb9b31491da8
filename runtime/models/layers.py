"""The weights of a decoder's layers, and what a step adds to their products.

Shapes: C hidden size, H query heads, G KV heads, D head size, E experts, F MLP size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from plait.kernels.quantized_weights import LinearWeight


class ProductPlace(NamedTuple):
    """Which product of a model: that of q, k and v, of the attention output, of gate and up, or of down of a layer; or
    the output head."""

    layer: int
    group: Literal["qkv", "output", "gate_up", "down", "head"]


HEAD = ProductPlace(-1, "head")


class StepUpdates(Protocol):
    """What adapters add to the products of one step."""

    def add_to(self, out: torch.Tensor, x: torch.Tensor, place: ProductPlace) -> None:
        """Adds the updates of all tokens' adapters for the inputs x [T, K] to the outputs [T, N] of a product."""

    def add_to_embeddings(self, out: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds those of the embedding to the embeddings [T, C] of token_ids [T]."""


class Projection(NamedTuple):
    """A linear layer, or several over the same inputs, as one product."""

    weight: LinearWeight  # [out, in]
    bias: torch.Tensor | None  # [out]
    place: ProductPlace


@dataclass(frozen=True)
class Attention:
    """The weights of one attention block; q, k and v are one projection.

    `head_norm` [H + G, D]: the norm weights of every query and key head, or None. `joint_norms` [H D] and [G D]: those
    of all queries and of all keys of a token, or None. `window`: see `ModelConfig.window`.
    """

    qkv: Projection
    output: Projection
    head_norm: torch.Tensor | None
    joint_norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int | None
    rope_table: int  # index into Decoder.rope_tables


@dataclass(frozen=True)
class MLP:
    """The weights of one MLP; gate and up are one projection."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class MoE:
    """The weights of E experts and of their router."""

    router: torch.Tensor  # [E, C]
    gate_up: torch.Tensor  # [E, 2 F, C]
    down: torch.Tensor  # [E, C, F]


@dataclass(frozen=True)
class Layer:
    """One decoder layer. The `post` norms are on the outputs of attention and MLP; None: there is no such norm."""

    attention_norm: torch.Tensor | None
    attention: Attention
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: MLP | MoE
    post_mlp_norm: torch.Tensor | None


def place_of(name: str) -> ProductPlace:
    """The place of a product by the name of its first module, such as "model.layers.0.mlp.gate_proj"."""
    layer, module = name.removeprefix("model.layers.").split(".", 1)
    groups: dict[str, Literal["qkv", "output", "gate_up", "down"]] = {"q": "qkv", "o": "output", "d": "down"}
    return ProductPlace(int(layer), groups.get(module.rpartition(".")[2][0], "gate_up"))
