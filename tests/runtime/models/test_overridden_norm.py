"""A family that overrides `Decoder.rms_norm` has its own norm on devices with fused kernels too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from plait.runtime.models.decoder import Decoder


class MeanNormDecoder(Decoder):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / x.abs().mean(-1, keepdim=True) * weight


def with_fused_kernels(cls: type[Decoder]) -> Any:
    """A decoder without weights, whose fused norm returns only zeros."""
    decoder = cls.__new__(cls)
    fused = SimpleNamespace(add_rms_norm=lambda delta, x, weight, eps: torch.zeros_like(x))
    decoder.kernels, decoder.config = SimpleNamespace(fused=fused), SimpleNamespace(rms_norm_eps=1e-5)  # type: ignore
    return decoder


def test_an_overridden_norm_replaces_the_fused_kernel() -> None:
    x, delta, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -4.0]]), torch.ones(2)
    total, normed = with_fused_kernels(MeanNormDecoder).add_rms_norm(x, delta, weight)
    assert total.tolist() == [[2.0, -2.0]] and normed.tolist() == [[1.0, -1.0]]


def test_rms_norm_uses_the_fused_kernel() -> None:
    x, delta, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -4.0]]), torch.ones(2)
    assert with_fused_kernels(Decoder).add_rms_norm(x, delta, weight)[1].tolist() == [[0.0, 0.0]]
