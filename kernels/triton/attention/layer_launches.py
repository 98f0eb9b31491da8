"""Attention of all layers over one layout: the launches of the first layer of each kind, repeated for the others.

For piecewise CUDA graphs, which launch the attention of every layer between two graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer
from plait.kernels.triton.attention.inputs import cache_tensors
from plait.kernels.triton.attention.paged import attention_launches
from plait.kernels.triton.kernel_launch import CacheTensors

POINTER_ALIGN_BYTES = 16  # Triton compiles other kernels for pointers that are not multiples of it


class _BoundLayer(NamedTuple):
    layer: AttentionLayer
    caches: CacheTensors
    kind: tuple[Any, ...]  # equal for layers whose launches differ in the addresses of the caches only


class LayerLaunches:
    """A `BoundAttention` of layers whose caches stay where they are."""

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = [_bind(layer) for layer in layers]

    def __call__(self, q: torch.Tensor, layout: AttentionLayout, out: torch.Tensor) -> list[Callable[[], None]]:
        """Returns the attention of each layer, to be launched in order."""
        repeats: dict[tuple[Any, ...], list[Callable[[CacheTensors], None]]] = {}

        def launch(bound: _BoundLayer) -> None:
            of_kind = repeats.get(bound.kind)
            if of_kind is None:
                launches = attention_launches(q, bound.layer, layout, out)
                repeats[bound.kind] = [launch.run_to_repeat() for launch in launches]
            else:
                for repeat in of_kind:
                    repeat(bound.caches)

        return [partial(launch, bound) for bound in self._layers]


def _bind(layer: AttentionLayer) -> _BoundLayer:
    tensors = cache_tensors(layer.cache)
    caches = CacheTensors.of(tensors)
    aligned = tuple(address % POINTER_ALIGN_BYTES == 0 for address in caches.addresses)
    described = tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)
    return _BoundLayer(layer, caches, (*layer[1:], aligned, described))
