"""The limits of the Triton operators, and whether a model is within them. Does not import triton at the top."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch

MAX_QUERY_HEADS_PER_KV_HEAD, MAX_HEAD_DIM = 16, 256


class HeadShape(NamedTuple):
    """The part of a model's shape that decides whether the attention kernels support it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def triton_unsupported_reason(dtype: torch.dtype, heads: HeadShape | None) -> str | None:
    """Returns why a model with this dtype and these heads cannot run on the Triton kernels; None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"Triton's operators are for bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if heads is not None:
        group, rest = divmod(heads.num_heads, heads.num_kv_heads)
        if rest or group > MAX_QUERY_HEADS_PER_KV_HEAD:
            return (
                f"{heads.num_heads} query heads over {heads.num_kv_heads} KV heads: "
                f"at most {MAX_QUERY_HEADS_PER_KV_HEAD} for each"
            )
        if heads.head_dim > MAX_HEAD_DIM or heads.head_dim % 2:
            return f"heads of {heads.head_dim} channels: even, and at most {MAX_HEAD_DIM}"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None
