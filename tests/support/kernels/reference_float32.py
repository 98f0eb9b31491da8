"""Row-wise reference operators that compute in float32 and round once, as the Triton kernels do.

`ops` has the same activations rounded to the model's dtype after every operation, as torch runs them on a CPU.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from plait.kernels.reference.ops import rms_norm


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x [T, C] to residual [T, C] in place (rounded to its dtype) and returns `rms_norm` of the sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up [..., C] of gate_up [..., 2 C], gate first (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_and_multiply` with the tanh form of GELU (Hendrycks and Gimpel 2016), as Gemma uses."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
