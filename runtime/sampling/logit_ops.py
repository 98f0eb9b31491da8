"""The sampling rule: what a logit operation takes and returns, and the parts of the rule that every device shares.

For each row of logits [V] float32:

    1. apply the repetition penalty, subtract the other penalties, add logit_bias;  2. set masked tokens to -inf
    3. if temperature is 0 or top_k is 1, take the first of the largest
    4. else compute probabilities at the temperature, filter them (top-k, then top-p of what is left, then min-p; see
       `is_kept`; then typical-p of what is left, see `is_typical`), and invert the cumulative distribution at
       `hash_uniform(seed, step)`

`numpy_ops` and `torch_ops` implement it. The Triton kernel follows the same rule
(`tests/support/kernels/reference_sampling.py`), but has no typical-p: its tokens are not the likeliest ones, so a
threshold does not find them. This file does not import torch, because the packed-CPU path runs without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from plait.runtime.arrays import Float32Array, Float64Array, IntArray
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.sampling_params import SamplingParams

TopLogprobs: TypeAlias = list[tuple[int, float]]  # (token id, logprob), falling

NO_TOKEN = -1  # the mask and the parameters leave no token; the same number as in kernels.sampling_inputs
NOT_FINITE = -2  # the logits hold NaN or +inf; the same number as in kernels.sampling_inputs
TOP_P_FIRST_PASS = 1024  # top-p sorts this many tokens before it sorts all of them

_BITS = (np.arange(256)[:, None] >> np.arange(8)) & 1  # [256, 8]
MASK_BYTE_BIAS = np.where(_BITS == 1, np.float32(0.0), np.float32(-np.inf))  # [256, 8]: bias of a mask byte's 8 tokens


class TokenMask(NamedTuple):
    """Packed masks `words` [len(rows), ceil(V / 32)] int32 of some sampled rows; other rows allow every token.

    `rows`: indices among the sampled rows. `allowed_ids`: for rows that allow few tokens, their ids, by the row's index
    among the batch's logits.
    """

    rows: list[int]
    words: IntArray
    allowed_ids: Mapping[int, npt.NDArray[np.int64]]


class DrawState(NamedTuple):
    """What a draw depends on besides the logits. A GenerationRequest has the same attributes."""

    params: SamplingParams
    seed: int
    num_sampled: int


class LogitOperations(Protocol):
    """Operations on logits where they are: `NumpyLogitOperations` on the host, `TorchLogitOperations` on a GPU.

    Logits are [B, V] float32, a row is [V].
    """

    def prepare(self, logits: Any) -> Any:
        """Converts the model's logits to what the other operations take."""

    def log_softmax(self, logits: Any) -> Any:
        """Log-softmax along the last axis, in new memory."""

    def values(self, row: Any, ids: Sequence[int]) -> list[float]:
        """The row's values at `ids`."""

    def topk(self, row: Any, count: int) -> TopLogprobs:
        """The `count` largest values of a row, falling."""

    def apply_penalties_and_bias(self, row: Any, request: GenerationRequest, ahead: Sequence[int] = ()) -> None:
        """Applies the penalties and logit_bias in place. ahead: tokens of a draft, behind the request's text.

        First the repetition penalty p, of the prompt's and the output's tokens: a positive logit x becomes x / p,
        another one x * p. Then the frequency and presence penalties, of the output's tokens, and the bias.
        """

    def apply_mask(self, logits: Any, mask: TokenMask) -> None:
        """Adds -inf in place where a token is not allowed."""

    def probabilities(self, row: Any, draw: GenerationRequest | DrawState) -> Float32Array | None:
        """The probabilities [V] of a row at its temperature, 0 for tokens that its filters leave out.

        None for a row whose largest logit is not finite.
        """

    def draw_tokens(self, logits: Any, draws: Sequence[GenerationRequest | DrawState]) -> list[int]:
        """One token id for each row; NO_TOKEN or NOT_FINITE where none can be drawn, see `failed_token`."""


def failed_token(peak: float) -> int:
    """The result for a row whose largest logit is not finite: NO_TOKEN for -inf, NOT_FINITE for NaN and +inf.

    No bias, penalty or mask turns NaN or +inf into a finite number, so these come from the model.
    """
    return NO_TOKEN if peak == -math.inf else NOT_FINITE


def output_counts_after(request: GenerationRequest, ahead: Sequence[int]) -> Mapping[int, int]:
    """How often the output has each token, if it goes on with the tokens `ahead`; {} without penalties that count."""
    if not (request.params.frequency_penalty or request.params.presence_penalty):
        return {}
    return Counter(request.output_counts) + Counter(ahead) if ahead else request.output_counts


def is_kept(weights: Any, mass_before: Any, total: Any, params: SamplingParams) -> Any:
    """Which tokens top-p and min-p keep, as a boolean array [N].

    `weights` [N]: probabilities up to a constant factor, falling, equal ones by token id, cut to the top k already.
    `mass_before` [N]: the sum of the weights before each. `total`: the sum of all that top-k left. NumPy or torch.
    """
    return (mass_before < params.top_p * total) & (weights >= params.min_p * weights[0]) & (weights > 0)


def is_typical(weights: Float64Array, typical_p: float) -> npt.NDArray[np.bool_]:
    """Which tokens typical-p keeps, as a boolean array [N].

    `weights` [N]: probabilities up to a constant factor, falling, equal ones by token id, 0 where other filters leave a
    token out. The tokens whose surprise -log p is closest to the entropy come first, equal ones in this order; they are
    kept until their probabilities sum to `typical_p`. Locally typical sampling: Meister et al. 2023, arXiv:2202.00666.

    >>> is_typical(np.array([0.5, 0.25, 0.25]), 0.4)  # bits: an entropy of 1.5; 1, 2 and 2
    array([ True, False, False])
    """
    probs = weights / weights.sum()
    is_possible = probs > 0
    surprise = -np.log(np.where(is_possible, probs, 1.0))
    distance = np.where(is_possible, np.abs(surprise - (probs * surprise).sum()), np.inf)
    order = np.argsort(distance, kind="stable")
    kept = np.zeros(len(weights), np.bool_)
    kept[order] = (probs[order].cumsum() - probs[order] < typical_p) & is_possible[order]
    return kept


def hash_uniform(seed: int, step: int) -> float:
    """A number in [0, 1) hashed from (seed, step) by two rounds of the mixer of splitmix64 (Steele et al. 2014)."""
    word = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1)
    for _ in range(2):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        word ^= word >> 31
    return (word >> 11) / 2.0**53
