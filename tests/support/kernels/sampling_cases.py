"""Makes sampling inputs for tests: rows of parameters as hypothesis draws them, packed masks, logits with many ties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from triton_device import DEVICE

from plait.kernels.sampling_inputs import SamplingInputs

ParamRow = tuple[float, int, float, float, int, int]  # temperature, top_k, top_p, min_p, seed, step


def f32(value: float) -> float:
    return float(np.float32(value))


row_of = st.tuples(
    st.sampled_from([0.0, 0.5, 0.75, 1.0, 1.5, 4.0]),
    st.sampled_from([-1, 0, 1, 2, 7, 50, 1000, 10**6]),
    st.sampled_from([1.0, 1.0, f32(0.999), f32(0.9), 0.5, f32(0.05)]),
    st.sampled_from([0.0, 0.0, f32(0.01), f32(0.1), 0.5, 1.0]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**40),
)


def inputs_of(rows: Sequence[ParamRow]) -> SamplingInputs:
    columns = list(zip(*rows, strict=True)) or [()] * 6
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    return SamplingInputs(*(torch.tensor(c, dtype=d, device=DEVICE) for c, d in zip(columns, dtypes, strict=True)))


def logits_of(rows: int, vocab: int, spread: float, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal logits; bfloat16 and a small spread make many ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(dtype).to(DEVICE)


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """Packed words [M, ceil(V / 32)] int32 of allowed [M, V] bool."""
    padded = torch.nn.functional.pad(allowed.cpu(), (0, -allowed.shape[1] % 32)).numpy()
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(words.copy()).to(DEVICE)
