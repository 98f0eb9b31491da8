"""The decoder leaves the sum and its norm to a fused kernel, on devices that have one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from plait.runtime.models.decoder import Decoder


def test_a_norm_behind_a_sum_uses_the_fused_kernel() -> None:
    """The decoder has no weights, and the fused norm returns only zeros."""
    decoder: Any = Decoder.__new__(Decoder)
    fused = SimpleNamespace(add_rms_norm=lambda delta, x, weight, eps: torch.zeros_like(x))
    decoder.kernels, decoder.config = SimpleNamespace(fused=fused), SimpleNamespace(rms_norm_eps=1e-5)
    x, delta, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -4.0]]), torch.ones(2)
    assert decoder.add_rms_norm(x, delta, weight)[1].tolist() == [[0.0, 0.0]]
