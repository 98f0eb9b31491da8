"""What a step's sampling needs on the device: parameters per row, masks, bias rows and penalty counts.

Everything is a tensor whose place never changes, so that a captured CUDA graph reads new values at each replay.
Knows: shapes and dtypes. Must not know: requests, what a parameter is for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_TOKEN = -1  # the mask and the logits leave no token
NOT_FINITE = -2  # the logits hold NaN or +inf


class SamplingInputs(NamedTuple):
    """One entry per row, all [B]."""

    temperature: torch.Tensor  # float32; 0 takes the largest logit
    top_k: torch.Tensor  # int32; 0 and below: all tokens, 1: the largest logit
    top_p: torch.Tensor  # float32; 1 and above: all tokens
    min_p: torch.Tensor  # float32; 0 and below: all tokens
    seed: torch.Tensor  # int64, the 64 bits of the seed
    step: torch.Tensor  # int64, tokens sampled so far


FLOAT_PARAMS = ("temperature", "top_p", "min_p")
"""The fields of SamplingInputs that are float32 and have the names of sampling parameters."""


class RowMasks(NamedTuple):
    """Packed masks: bit i % 32 of word i // 32 set means that token i is allowed."""

    words: torch.Tensor  # [M, ceil(V / 32)] int32
    rows: torch.Tensor  # [B] int32, the row's place in `words`, -1 where it has no mask


class RowBias(NamedTuple):
    """Numbers added to the logits of some rows."""

    values: torch.Tensor  # [N, V] float32
    rows: torch.Tensor  # [B] int32, the row's place in `values`, -1 where it has none


class Penalties(NamedTuple):
    """Takes counts * frequency + (counts > 0) * presence off the logits of some rows."""

    counts: torch.Tensor  # [N, V] int32, uses of each token so far
    rows: torch.Tensor  # [B] int32, the row's place in `counts`, -1 where it has none
    frequency: torch.Tensor  # [B] float32
    presence: torch.Tensor  # [B] float32


class LogitAdjustments(NamedTuple):
    """What bends a step's logits before a token is drawn, each part where there is one."""

    masks: RowMasks | None = None
    bias: RowBias | None = None
    penalties: Penalties | None = None


NO_ADJUSTMENTS = LogitAdjustments()
