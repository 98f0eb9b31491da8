"""What the sampler does to logits on a GPU, in torch: `sampler.LogitOperations`.

Of use where the device's own sampler, `device_sampling`, does not have what a row asks for.

Knows: tensors, sampling parameters. Must not know: rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from plait.runtime.batch.request import GenerationRequest
from plait.runtime.sampling.filters import keep_mask
from plait.runtime.sampling.sampler import (
    NO_TOKEN,
    NOT_FINITE,
    DrawState,
    TokenMask,
    TopLogprobs,
    has_filters,
    hash_uniform,
)

TOP_P_FIRST_PASS = 1024  # top-p looks this far down the sorted tokens before it sorts them all


class TorchLogitOperations:
    """See `LogitOperations`, which says what each does; logits are tensors on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # bias of the 8 tokens behind each possible mask byte: a table look-up costs the same at any density
        allowed = (torch.arange(256)[:, None] >> torch.arange(8)) & 1  # [256, 8]
        self._mask_byte_bias = torch.where(allowed.bool(), 0.0, float("-inf")).to(device)

    def prepare(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.to(self._device)

    @torch.inference_mode()
    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, dim=-1)

    def values(self, row: torch.Tensor, ids: Sequence[int]) -> list[float]:
        found: list[float] = row[list(ids)].tolist()
        return found

    def topk(self, row: torch.Tensor, count: int) -> TopLogprobs:
        values, ids = torch.topk(row, min(count, len(row)))
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    @torch.inference_mode()
    def apply_penalties_and_bias(self, row: torch.Tensor, gen: GenerationRequest) -> None:
        params = gen.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        if gen.output_counts and (params.frequency_penalty or params.presence_penalty):
            ids = torch.tensor(list(gen.output_counts), device=row.device)
            counts = torch.tensor(list(gen.output_counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= counts * params.frequency_penalty + params.presence_penalty

    @torch.inference_mode()
    def apply_mask(self, logits: torch.Tensor, mask: TokenMask) -> None:
        packed = torch.from_numpy(mask.words.view(np.uint8)).to(logits.device)  # [rows, 4 * words]
        looked_up = torch.index_select(self._mask_byte_bias, 0, packed.view(-1).int())  # [rows * 4 * words, 8]
        bias = looked_up.view(len(packed), -1)[:, : logits.shape[1]]
        if len(mask.rows) == len(logits):
            logits += bias
        else:
            logits[mask.rows] += bias

    @torch.inference_mode()
    def draw_tokens(self, logits: torch.Tensor, generations: Sequence[GenerationRequest | DrawState]) -> list[int]:
        found, at = logits.max(dim=-1)
        peaks, tokens = found.tolist(), at.tolist()
        drawn = [i for i, gen in enumerate(generations) if math.isfinite(peaks[i]) and not gen.params.is_greedy]
        plain = [i for i in drawn if not has_filters(generations[i])]
        if plain:
            highest = _column_tensor(logits, [peaks[i] for i in plain])
            scaled = logits[plain].double() - highest  # the peak at 0, so that no temperature overflows
            probs = torch.softmax(
                scaled / _column_tensor(scaled, [generations[i].params.temperature for i in plain]), dim=-1
            )
            for i, token in zip(plain, _inverse_transform_sample(probs, [generations[i] for i in plain]), strict=True):
                tokens[i] = token
        for i in drawn:
            if has_filters(generations[i]):
                tokens[i] = _sample_filtered(logits[i], generations[i])
        for i, peak in enumerate(peaks):
            if not math.isfinite(peak):
                tokens[i] = NO_TOKEN if peak == -math.inf else NOT_FINITE
        return tokens


def _column_tensor(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _inverse_transform_sample(probs: torch.Tensor, generations: Sequence[GenerationRequest | DrawState]) -> list[int]:
    """Inverse transform sampling along the last axis of probs [B, N] float64 (not necessarily normalized)."""
    cumulative = probs.cumsum(dim=-1)
    draws = torch.tensor(
        [hash_uniform(g.seed, g.num_sampled) for g in generations], dtype=probs.dtype, device=probs.device
    )
    wanted = draws[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return [min(int(i), probs.shape[1] - 1) for i in found.tolist()]


def _sample_filtered(logits: torch.Tensor, gen: GenerationRequest | DrawState) -> int:
    """Draws from one row [V] under top-k, then top-p of what is left, then min-p; ties in order of token id."""
    params = gen.params
    probs = torch.softmax((logits.double() - logits.max()) / params.temperature, dim=-1)
    count = min(len(probs), TOP_P_FIRST_PASS if params.top_k < 0 else max(params.top_k, 1))
    values, ids = _stable_topk(probs, count)
    if params.top_k < 0 and count < len(probs) and float(values.sum()) < params.top_p:
        values, ids = _stable_topk(probs, len(probs))
    total = values.sum() if params.top_k > 0 else torch.ones((), dtype=values.dtype, device=values.device)
    before = values.cumsum(dim=-1) - values  # the mass of the more likely tokens
    keep = keep_mask(values, before, total, params)
    if not bool(keep.any()):
        return int(ids[0])
    kept = torch.where(keep, values, torch.zeros_like(values))
    return int(ids[_inverse_transform_sample(kept[None], [gen])[0]])


def _stable_topk(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of probs [V] in falling order, equal ones by token id, with their ids."""
    if count == len(probs):
        return torch.sort(probs, descending=True, stable=True)
    values, ids = torch.topk(probs, count)
    floor = values[-1]
    above = torch.nonzero(probs > floor).flatten()
    level = torch.nonzero(probs == floor).flatten()[: count - len(above)]
    ids = torch.cat([above, level])
    values, order = torch.sort(probs[ids], descending=True, stable=True)
    return values, ids[order]
