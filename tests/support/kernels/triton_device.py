"""Where the Triton tests run: on the GPU, or on the CPU in Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

import os

import interpreter_bfloat16
import interpreter_call_cache
import interpreter_operators
import interpreter_type_cache
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if INTERPRETED:
    interpreter_bfloat16.install()
    interpreter_call_cache.install()
    interpreter_type_cache.install()
    interpreter_operators.install()


def close_enough(dtype: torch.dtype) -> dict[str, float]:
    """Tolerances for two roundings to dtype of results of order one."""
    return {torch.bfloat16: dict(atol=2e-2, rtol=2e-2), torch.float16: dict(atol=2e-3, rtol=2e-3)}.get(
        dtype, dict(atol=1e-5, rtol=1e-5)
    )
