"""The weights of a decoder on a CPU: packed matrices, float32 vectors, and the settings of its layers.

The functions describe them to the kernels (`decoder_args`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.gemm.layout_kernels import layout_kernel
from plait.kernels.cpu.gemm.packed_linear import PART_COLUMNS
from plait.kernels.cpu.gemm.packed_weights import PackedPair, PackedWeight
from plait.kernels.cpu.kernel_types import HeadLayout

NO_WINDOW = 1 << 40  # a window longer than any sequence
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer.

    Norms are float32 [C], `head_norms` [(H + G) * D], `bias` [(H + 2 G) * D]. `qkv` is one weight, or up to three with
    different quantized forms. With a `router`, float32 [E, C], the outputs of gate, up and down are those of all
    experts, one expert after the other.
    """

    norm: Floats | None
    qkv: Sequence[PackedWeight]
    bias: Floats | None
    head_norms: Floats | None
    output: PackedWeight
    post_norm: Floats | None
    mlp_norm: Floats | None
    gate_up: PackedPair
    down: PackedWeight
    post_mlp_norm: Floats | None
    window: int | None
    rope_table: int
    router: Floats | None = None


@dataclass(frozen=True)
class Experts:
    """The settings of a mixture of experts. `normalize_topk`: the chosen experts' weights are scaled to sum to 1."""

    num_experts: int
    experts_per_token: int
    normalize_topk: bool


@dataclass(frozen=True)
class DecoderWeights:
    """The weights of a model.

    `rope_tables`: cos and sin, float32 [context, D / 2], of each rotary table. `joint_head_norms`: queries and keys are
    each normed over all heads of a token together, not head by head.
    """

    embedding: PackedWeight
    embedding_scale: float
    layers: Sequence[LayerWeights]
    norm: Floats
    head: PackedWeight
    rope_tables: Sequence[tuple[Floats, Floats]]
    heads: HeadLayout
    eps: float
    activation: int
    joint_head_norms: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    experts: Experts | None = None


def _address(array: npt.NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def weight_part(weight: PackedWeight, stride: int | None = None) -> list[int]:
    """Returns the columns that describe one part of a packed weight (`packed_linear`)."""
    return [weight.address, stride or weight.tile_bytes, len(weight.data), *layout_kernel(weight.layout.name)]


def layer_args(layer: LayerWeights) -> list[int]:
    """Returns the row of a layer in LAYERS."""
    absent = [[0] * PART_COLUMNS] * (3 - len(layer.qkv))
    qkv = [*(weight_part(part) for part in layer.qkv), *absent]
    gate_up = [weight_part(part, layer.gate_up.stride) for part in (layer.gate_up.first, layer.gate_up.second)]
    parts = [*qkv, weight_part(layer.output), *gate_up, weight_part(layer.down)]
    vectors = (layer.norm, layer.post_norm, layer.mlp_norm, layer.post_mlp_norm, layer.head_norms, layer.bias)
    return [
        *(number for part in parts for number in part),
        *(_address(vector) for vector in (*vectors, layer.router)),
        layer.window or NO_WINDOW,
        layer.rope_table,
        0,  # not captured
    ]
