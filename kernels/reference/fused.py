"""The small row-wise operators in plain torch: norms fused with the residual, gated activations.

Each is what its Triton twin in `kernels/triton` is held against, and has the same signature. `out` receives the
result where it is given (it may be the input itself), so that a captured graph needs no allocation.
Knows: torch. Must not know: models.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., C] over its root mean square along C, times weight [C] (Zhang and Sennrich 2019), in x's dtype.

    With x [T, H, C] this is the norm of every head. The mean is taken in float32. Llama's form rounds to x's
    dtype before it multiplies; Gemma's (`unit_offset`) multiplies by 1 + weight in float32 and rounds once, as does
    a float32 weight, which may hold that sum already.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        result = (scaled * (1.0 + weight.float())).to(x.dtype)
    else:
        result = (scaled.to(weight.dtype) * weight).to(x.dtype)
    return result if out is None else out.copy_(result)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds x [T, C] to residual [T, C] in place (rounded to its dtype) and returns the norm of that sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps, unit_offset=unit_offset, out=out)


def silu_and_multiply(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2 C], gate first (SwiGLU, Shazeer 2020). Float32 inside, returns [..., C]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    result = (functional.silu(gate) * up).to(gate_up.dtype)
    return result if out is None else out.copy_(result)


def gelu_tanh_and_multiply(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `silu_and_multiply` with the tanh form of GELU (Hendrycks and Gimpel 2016), as Gemma has it."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    result = (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
    return result if out is None else out.copy_(result)
