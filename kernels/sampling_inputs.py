"""The inputs of a step's sampling on the device: parameters per row, masks, bias rows and penalty counts.

A captured CUDA graph reads these tensors at fixed addresses, with new values at each replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_TOKEN = -1  # status of a row whose mask and logits allow no token
NOT_FINITE = -2  # status of a row whose logits contain NaN or +inf


class SamplingInputs(NamedTuple):
    """Sampling parameters, one entry per row: all [B]."""

    temperature: torch.Tensor  # float32; 0: the largest logit
    top_k: torch.Tensor  # int32; 0 and below: all tokens, 1: the largest logit
    top_p: torch.Tensor  # float32; 1 and above: all tokens
    min_p: torch.Tensor  # float32; 0 and below: all tokens
    seed: torch.Tensor  # int64, the 64 bits of the seed
    step: torch.Tensor  # int64, tokens sampled so far


FLOAT_PARAMS = ("temperature", "top_p", "min_p")
"""The fields of SamplingInputs that are float32 and have the names of sampling parameters."""


class RowMasks(NamedTuple):
    """Packed token masks: token i is allowed if bit i % 32 of word i // 32 is set."""

    words: torch.Tensor  # [M, ceil(V / 32)] int32
    rows: torch.Tensor  # [B] int32, index of the row's mask in `words`, -1 without mask


class RowBias(NamedTuple):
    """Values added to the logits of some rows."""

    values: torch.Tensor  # [N, V] float32
    rows: torch.Tensor  # [B] int32, index of the row's bias in `values`, -1 without bias


class Penalties(NamedTuple):
    """Changes the logits x of some rows by the tokens of their prompts and outputs.

    First, for tokens in the prompt or the output, x becomes x / repetition if it is positive, else x * repetition. Then
    counts * frequency + (counts > 0) * presence is subtracted.
    """

    counts: torch.Tensor  # [N, V] int32, uses of each token in the output so far
    prompts: torch.Tensor  # [N, ceil(V / 32)] int32, packed as RowMasks.words: the tokens of the prompt
    rows: torch.Tensor  # [B] int32, index of the row in `counts` and `prompts`, -1 without penalties
    frequency: torch.Tensor  # [B] float32
    presence: torch.Tensor  # [B] float32
    repetition: torch.Tensor  # [B] float32, above 0; 1: no change


PENALTY_PARAMS = ("frequency", "presence", "repetition")
"""The fields of Penalties whose sampling parameters are named `<field>_penalty`."""


class LogitAdjustments(NamedTuple):
    """The changes to a step's logits before sampling: penalties, then bias, then the mask. None: not applied."""

    masks: RowMasks | None = None
    bias: RowBias | None = None
    penalties: Penalties | None = None


NO_ADJUSTMENTS = LogitAdjustments()
