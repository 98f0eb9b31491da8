"""Where the Triton tests run: on the GPU, or on the CPU in Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def close_enough(dtype: torch.dtype) -> dict[str, float]:
    """Tolerances for two roundings to dtype. The interpreter cuts bfloat16 off where a GPU rounds to nearest."""
    return {torch.bfloat16: dict(atol=2e-2, rtol=2e-2), torch.float16: dict(atol=2e-3, rtol=2e-3)}.get(
        dtype, dict(atol=1e-5, rtol=1e-5)
    )


def rounds_as_torch(dtype: torch.dtype) -> bool:
    """Whether one rounding to dtype gives the very bits that torch gives."""
    return not (INTERPRETED and dtype == torch.bfloat16)
