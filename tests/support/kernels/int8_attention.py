"""What attention with an int8 KV cache computes in integers, in float64, and how far a kernel's result may be from it.

The scheme (`int8_vnni_kernel`): a query q is rounded to integers of 16 bits times max|q| / 32512. A score is then exact
but for float32. Of a block of 64 positions, p * s (probability times scale of the position's values) is rounded to a
multiple of a power of two, the unit, of which 2 ** 15 are at most the largest p times the largest s. So, with softmax
weights w and integers v of the values, a block adds to an output's error at most

    unit / 2 * sum of |v|  <=  2 ** -16 * (largest w) * (largest s) * sum of |v|  over the positions that the token sees

What float32 adds: if every weight is off by the relative error e, the result is off by at most e times the standard
deviation of the values under the weights, since errors that all weights share cancel (and the mean absolute deviation
is at most the standard deviation). e sums up the errors of scores, of 2 ** x (3e-6, `llvm.exp2`) and of each rescaling.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from plait.kernels.cpu.attention.kv_layout import KV_BLOCK
from plait.kernels.cpu.attention.online_softmax import LOG2_E, RESCALE_LOG2
from plait.kernels.cpu.attention.products.int8_vnni_kernel import MAX_QUERY, PROB_MARGIN
from plait.kernels.cpu.attention.tiling import BLOCKS_PER_SPLIT
from plait.kernels.layout import AttentionLayout

EXP2_ERROR, TANH_ERROR, FLOAT32_ERROR = 3e-6, 2e-6, 2.0**-24


def rounded_queries(queries: torch.Tensor) -> torch.Tensor:
    """Queries, float32 [T, H, D], rounded to 16 bits, as float64."""
    largest = queries.abs().amax(-1, keepdim=True)
    integers = (queries * (np.float32(MAX_QUERY) / largest)).round().double()
    return integers * (largest * np.float32(1 / MAX_QUERY)).double()


def integer_attention(
    queries: torch.Tensor,  # [T, H, D]
    keys: torch.Tensor,  # [slots, G, D], float32
    values: torch.Tensor,
    value_scales: torch.Tensor,  # [slots, G]
    layout: AttentionLayout,
    scale: float,
    window: int | None,
    softcap: float,  # 0: none
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the bound of its error, float64 [T, H, D]."""
    queries, bounds = rounded_queries(queries), []
    out, group = torch.empty_like(queries), queries.shape[1] // keys.shape[1]
    for row in range(layout.num_rows):
        new, slots = slice(*layout.q_starts[row : row + 2].tolist()), layout.slots(row)
        k, v = (cache[slots].double() for cache in (keys, values))
        scores = torch.einsum("qgnd,kgd->gnqk", queries[new].unflatten(1, (-1, group)), k) * scale
        score_error = 4 * FLOAT32_ERROR * float(scores.abs().max())
        if softcap:
            scores, score_error = softcap * torch.tanh(scores / softcap), score_error + TANH_ERROR * softcap
        distance = layout.positions[new, None] - torch.arange(len(slots))
        seen = (distance >= 0) & (distance < (window or 1 << 40))
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        result = torch.einsum("gnqk,kgd->qgnd", weights, v)
        deviation = (torch.einsum("gnqk,kgd->qgnd", weights, v * v) - result * result).clamp(min=0).sqrt()
        moves = float(scores.max() - scores.min()) * LOG2_E / RESCALE_LOG2 + len(slots) / KV_BLOCK / BLOCKS_PER_SPLIT
        weight_error = math.expm1(score_error) + EXP2_ERROR * (2 + moves)
        blocks = len(slots) // KV_BLOCK + 1
        sums = torch.einsum("gnqk,kgd->qgnd", weights, v.abs())
        bound = _rounding_bound(weights, seen, v, value_scales[slots].double())
        bounds.append(bound + weight_error * deviation + 4 * blocks * FLOAT32_ERROR * sums)
        out[new] = result.flatten(1, 2)
    return out, torch.cat(bounds).flatten(1, 2)


def _rounding_bound(
    weights: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """The error [q, G, H / G, D] of rounding products of weights [G, H / G, q, K] and scales [K, G]."""
    bound, integers = torch.zeros(()), torch.where(scales[..., None] > 0, values.abs() / scales[..., None], 0)
    for first in range(0, values.shape[0], KV_BLOCK):
        block = slice(first, first + KV_BLOCK)
        visible = seen[:, block].double()
        largest_scale = (visible[..., None] * scales[block]).amax(1)  # [q, G]
        unit = weights[..., block].amax(-1).permute(2, 0, 1) * largest_scale[..., None]  # [q, G, H / G], of 2 ** -15
        sums = torch.einsum("qk,kgd->qgd", visible, integers[block])
        bound = bound + (PROB_MARGIN + 2**-7) * 2**-16 * unit[..., None] * sums[:, :, None]
    return bound
