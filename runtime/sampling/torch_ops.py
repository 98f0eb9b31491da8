"""The sampler's logit operations in torch, for a GPU without Triton's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from plait.runtime.arrays import Float32Array
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.sampling.logit_ops import (
    MASK_BYTE_BIAS,
    TOP_P_FIRST_PASS,
    DrawState,
    TokenMask,
    TopLogprobs,
    failed_token,
    hash_uniform,
    is_kept,
    is_typical,
    output_counts_after,
)
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations


class TorchLogitOperations:
    """Implements `sampler.LogitOperations` on tensors on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mask_byte_bias = torch.from_numpy(MASK_BYTE_BIAS).to(device)

    def prepare(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.to(self._device)

    @torch.inference_mode()
    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, dim=-1)

    def values(self, row: torch.Tensor, ids: Sequence[int]) -> list[float]:
        values: list[float] = row[list(ids)].tolist()
        return values

    def topk(self, row: torch.Tensor, count: int) -> TopLogprobs:
        values, ids = torch.topk(row, min(count, len(row)))
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    @torch.inference_mode()
    def apply_penalties_and_bias(self, row: torch.Tensor, gen: GenerationRequest, ahead: Sequence[int] = ()) -> None:
        params = gen.params
        if gen.seen_tokens is not None:
            ids = torch.from_numpy(gen.seen_tokens.ids(ahead).astype(np.int64)).to(row.device)
            logits, penalty = row[ids], params.repetition_penalty
            row[ids] = torch.where(logits > 0, logits / penalty, logits * penalty)
        if output_counts := output_counts_after(gen, ahead):
            ids = torch.tensor(list(output_counts), device=row.device)
            counts = torch.tensor(list(output_counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= counts * params.frequency_penalty + params.presence_penalty
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)

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
    def probabilities(self, row: torch.Tensor, draw: GenerationRequest | DrawState) -> Float32Array | None:
        """See `LogitOperations`. Computed on the host."""
        return NumpyLogitOperations().probabilities(row.float().cpu().numpy(), draw)

    def draw_tokens(self, logits: torch.Tensor, generations: Sequence[GenerationRequest | DrawState]) -> list[int]:
        max_values, argmax = logits.max(dim=-1)
        max_logits, tokens = max_values.tolist(), argmax.tolist()
        sampled = [i for i, gen in enumerate(generations) if math.isfinite(max_logits[i]) and not gen.params.is_greedy]
        unfiltered = [i for i in sampled if not generations[i].params.is_filtered]
        if unfiltered:
            # The largest logit becomes 0, so that no temperature overflows.
            scaled = logits[unfiltered].double() - _column_tensor(logits, [max_logits[i] for i in unfiltered])
            temperatures = _column_tensor(scaled, [generations[i].params.temperature for i in unfiltered])
            probs = torch.softmax(scaled / temperatures, dim=-1)
            drawn = _inverse_transform_sample(probs, [generations[i] for i in unfiltered])
            for i, token in zip(unfiltered, drawn, strict=True):
                tokens[i] = token
        for i in sampled:
            if generations[i].params.is_filtered:
                tokens[i] = _sample_filtered(logits[i], generations[i])
        for i, max_logit in enumerate(max_logits):
            if not math.isfinite(max_logit):
                tokens[i] = failed_token(max_logit)
        return tokens


def _column_tensor(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _inverse_transform_sample(probs: torch.Tensor, generations: Sequence[GenerationRequest | DrawState]) -> list[int]:
    """Samples an index per row of probs [B, N] float64, which need not be normalized, by inverse transform sampling."""
    cumulative = probs.cumsum(dim=-1)
    draws = torch.tensor(
        [hash_uniform(g.seed, g.num_sampled) for g in generations], dtype=probs.dtype, device=probs.device
    )
    targets = draws[:, None] * cumulative[:, -1:]
    indices = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return [min(int(i), probs.shape[1] - 1) for i in indices.tolist()]


def _sample_filtered(logits: torch.Tensor, gen: GenerationRequest | DrawState) -> int:
    """Samples a token of one row [V] after the filters, see `logit_ops`; ties in order of token id."""
    params = gen.params
    probs = torch.softmax((logits.double() - logits.max()) / params.temperature, dim=-1)
    count = min(len(probs), TOP_P_FIRST_PASS if params.top_k < 0 else max(params.top_k, 1))
    values, ids = _stable_topk(probs, count)
    if params.top_k < 0 and count < len(probs) and float(values.sum()) < params.top_p:
        values, ids = _stable_topk(probs, len(probs))
    total = values.sum() if params.top_k > 0 else torch.ones((), dtype=values.dtype, device=values.device)
    keep = is_kept(values, values.cumsum(dim=-1) - values, total, params)
    if not bool(keep.any()):
        return int(ids[0])
    kept = torch.where(keep, values, torch.zeros_like(values))
    if params.typical_p < 1.0:
        kept *= torch.from_numpy(is_typical(kept.cpu().numpy(), params.typical_p)).to(kept.device)
    return int(ids[_inverse_transform_sample(kept[None], [gen])[0]])


def _stable_topk(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `count` largest of probs [V] in falling order, equal ones by token id, with their ids."""
    if count == len(probs):
        return torch.sort(probs, descending=True, stable=True)
    values, ids = torch.topk(probs, count)
    smallest = values[-1]
    above = torch.nonzero(probs > smallest).flatten()
    ties = torch.nonzero(probs == smallest).flatten()[: count - len(above)]
    ids = torch.cat([above, ties])
    values, order = torch.sort(probs[ids], descending=True, stable=True)
    return values, ids[order]
