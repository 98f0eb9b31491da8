"""Chooses tokens from logits: penalties, bias, mask, temperature, top-k, top-p, min-p, a seeded draw, logprobs.

A row's outcome depends on its own logits, parameters, seed and step alone, never on its neighbours: every
operation works along the last axis, and the draw is one uniform number hashed from (seed, step), looked up in
the row's cumulative distribution.

Knows: logits and sampling parameters. Must not know: sessions, pages, models.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from plait.runtime.messages import TokenLogprob
from plait.runtime.sampling import SamplingParams
from plait.runtime.scheduler.page_pool import IntArray
from plait.runtime.scheduler.rows import Batch, BatchRow, Generation, Scoring

TopLogprobs: TypeAlias = list[tuple[int, float]]

NO_TOKEN = -1  # the mask and the parameters leave no token
NOT_FINITE = -2  # the logits hold NaN or +inf
NUCLEUS_FIRST = 1024  # top-p looks this far down the sorted tokens before it sorts them all


class Mask(NamedTuple):
    """Packed masks `words` [len(rows), ceil(V / 32)] int32 for those of the sampled rows that are in `rows`.

    `narrow`: of the rows that admit few tokens, the token ids, by the row's index among the batch's logits.
    """

    rows: list[int]
    words: IntArray
    narrow: Mapping[int, npt.NDArray[np.int64]]


@dataclass
class Sampled:
    """What a step gave: a token (or NO_TOKEN, NOT_FINITE) per generation; logprobs where asked for."""

    tokens: dict[Generation, int] = field(default_factory=dict)
    logprobs: dict[Generation, TokenLogprob] = field(default_factory=dict)
    scores: dict[Scoring, dict[tuple[int, int], float]] = field(default_factory=dict)
    tops: dict[Scoring, dict[int, list[tuple[int, float]]]] = field(default_factory=dict)
    prompt_logprobs: dict[Generation, list[TokenLogprob]] = field(default_factory=dict)
    drafted: dict[Generation, list[int]] = field(default_factory=dict)  # one more token than there were guesses


class Draw(NamedTuple):
    """What a random choice depends on besides the logits; a Generation has the same."""

    params: SamplingParams
    seed: int
    num_sampled: int


class Sampler:
    """See the file's header."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        # bias of the 8 tokens behind each possible mask byte: a table look-up costs the same at any density
        allowed = (torch.arange(256)[:, None] >> torch.arange(8)) & 1  # [256, 8]
        self._bias_of_byte = torch.where(allowed.bool(), 0.0, float("-inf")).to(self._device)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: Batch, mask: Mask | None) -> Sampled:
        """Logits [batch.num_logits, V] float32, in the order of the batch's rows. They may be changed."""
        logits, sampled, at = logits.to(self._device), Sampled(), 0
        for each in batch.rows:
            if isinstance(each.row, Scoring) and each.num_logits:
                first = each.start + each.count - each.num_logits
                own, targets = logits[at : at + each.num_logits], each.row.targets
                sampled.scores[each.row] = score(own, first, targets)
                if each.row.selection.top_logprobs:
                    sampled.tops[each.row] = likeliest(own, first, targets, each.row.selection.top_logprobs)
            elif isinstance(each.row, Generation) and each.num_draft:
                sampled.drafted[each.row] = self._verify(logits[at : at + each.num_logits], each.row)
            elif isinstance(each.row, Generation) and each.num_logits - each.is_sampled > 0:
                sampled.prompt_logprobs[each.row] = prompt_logprobs(logits[at : at + each.num_logits], each)
            at += each.num_logits
        places = batch.sampled_rows()
        if places:
            rows = logits if len(places) == len(logits) else logits[[at for at, _ in places]]
            self._sample_generations(rows, [gen for _, gen in places], mask, sampled)
        return sampled

    def _verify(self, logits: torch.Tensor, gen: Generation) -> list[int]:
        """What the model chooses at each position of logits [1 + guesses, V], as if it had come there by itself."""
        finite = _is_finite(logits)
        for row in logits:
            adjust(row, gen)
        draws = [Draw(gen.params, gen.seed, gen.num_sampled + offset) for offset in range(len(logits))]
        return [token if good else NOT_FINITE for token, good in zip(choose(logits, draws), finite, strict=True)]

    def _sample_generations(
        self, logits: torch.Tensor, generations: list[Generation], mask: Mask | None, sampled: Sampled
    ) -> None:
        wants = [i for i, gen in enumerate(generations) if gen.params.logprobs]
        raw = torch.log_softmax(logits[wants], dim=-1) if wants else None  # before anything bends them
        finite = _is_finite(logits)
        for i, gen in enumerate(generations):
            adjust(logits[i], gen)
        if mask is not None:
            self.apply_mask(logits, mask)
        tokens = choose(logits, generations)
        for gen, token, good in zip(generations, tokens, finite, strict=True):
            sampled.tokens[gen] = token if good else NOT_FINITE
        if raw is not None:
            for logprobs, i in zip(raw, wants, strict=True):
                if sampled.tokens[generations[i]] >= 0:
                    top = generations[i].params.top_logprobs
                    sampled.logprobs[generations[i]] = token_logprob(logprobs, tokens[i], top)

    def apply_mask(self, logits: torch.Tensor, mask: Mask) -> None:
        """Adds -inf where a token is not allowed. logits [B, V] float32, changed in place."""
        packed = torch.from_numpy(mask.words.view(np.uint8)).to(logits.device)  # [rows, 4 * words]
        looked_up = torch.index_select(self._bias_of_byte, 0, packed.view(-1).int())  # [rows * 4 * words, 8]
        bias = looked_up.view(len(packed), -1)[:, : logits.shape[1]]
        if len(mask.rows) == len(logits):
            logits += bias
        else:
            logits[mask.rows] += bias


def _is_finite(logits: torch.Tensor) -> list[bool]:
    peaks = logits.amax(dim=-1)  # NaN and +inf both show in the maximum
    return [bool(x) for x in (torch.isfinite(peaks) | (peaks == float("-inf"))).tolist()]


def adjust(logits: torch.Tensor, gen: Generation) -> None:
    """Adds logit_bias and takes the penalties off one row [V]; frequency counts each use, presence any."""
    params = gen.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if gen.output_counts and (params.frequency_penalty or params.presence_penalty):
        ids = torch.tensor(list(gen.output_counts), device=logits.device)
        counts = torch.tensor(list(gen.output_counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= counts * params.frequency_penalty + params.presence_penalty


def choose(logits: torch.Tensor, generations: Sequence[Generation | Draw]) -> list[int]:
    """One token id per row of logits [B, V], NO_TOKEN where every logit is -inf."""
    peaks, best = logits.max(dim=-1)
    tokens: list[int] = best.tolist()
    finite = torch.isfinite(peaks).tolist()
    drawn = [i for i, gen in enumerate(generations) if finite[i] and not gen.params.is_greedy]
    plain = [i for i in drawn if not _is_filtered(generations[i])]
    if plain:
        scaled = logits[plain].double() - peaks[plain, None]  # the peak at 0, so that no temperature overflows
        probs = torch.softmax(scaled / _column(scaled, [generations[i].params.temperature for i in plain]), dim=-1)
        for i, token in zip(plain, _draw(probs, [generations[i] for i in plain]), strict=True):
            tokens[i] = token
    for i in drawn:
        if _is_filtered(generations[i]):
            tokens[i] = _draw_filtered(logits[i], generations[i])
    return [NO_TOKEN if peak == float("-inf") else token for peak, token in zip(peaks.tolist(), tokens, strict=True)]


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) hashed from (seed, step): two rounds of splitmix64's mixer (Steele et al. 2014)."""
    word = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1)
    for _ in range(2):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        word ^= word >> 31
    return (word >> 11) / 2.0**53


def _is_filtered(gen: Generation | Draw) -> bool:
    return gen.params.top_k > 0 or gen.params.top_p < 1.0 or gen.params.min_p > 0.0


def _column(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _draw(probs: torch.Tensor, generations: Sequence[Generation | Draw]) -> list[int]:
    """Inverse transform sampling along the last axis of probs [B, N] float64 (not necessarily normalized)."""
    cumulative = probs.cumsum(dim=-1)
    draws = torch.tensor([uniform(g.seed, g.num_sampled) for g in generations], dtype=probs.dtype, device=probs.device)
    wanted = draws[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return [min(int(i), probs.shape[1] - 1) for i in found.tolist()]


def _draw_filtered(logits: torch.Tensor, gen: Generation | Draw) -> int:
    """Draws from one row [V] under top-k, then top-p of what is left, then min-p; ties in order of token id."""
    params = gen.params
    probs = torch.softmax((logits.double() - logits.max()) / params.temperature, dim=-1)
    count = min(len(probs), NUCLEUS_FIRST if params.top_k < 0 else max(params.top_k, 1))
    values, ids = _largest(probs, count)
    if params.top_k < 0 and count < len(probs) and float(values.sum()) < params.top_p:
        values, ids = _largest(probs, len(probs))
    total = values.sum() if params.top_k > 0 else torch.ones((), dtype=values.dtype, device=values.device)
    before = values.cumsum(dim=-1) - values  # the mass of the more likely tokens
    keep = (before < params.top_p * total) & (values >= params.min_p * values[0]) & (values > 0)
    if not bool(keep.any()):
        return int(ids[0])
    kept = torch.where(keep, values, torch.zeros_like(values))
    return int(ids[_draw(kept[None], [gen])[0]])


def _largest(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def score(logits: torch.Tensor, first: int, targets: dict[int, tuple[int, ...]]) -> dict[tuple[int, int], float]:
    """{(position, token): logprob} for the targets at positions [first, first + len(logits)). logits [n, V]."""
    found: dict[tuple[int, int], float] = {}
    for offset in range(len(logits)):
        wanted = targets.get(first + offset)
        if wanted:
            logprobs = torch.log_softmax(logits[offset], dim=-1)
            for token, value in zip(wanted, logprobs[list(wanted)].tolist(), strict=True):
                found[first + offset, token] = value
    return found


def prompt_logprobs(logits: torch.Tensor, each: BatchRow) -> list[TokenLogprob]:
    """Those of the tokens that follow the positions of logits [n, V], as far as the row's text goes."""
    assert isinstance(each.row, Generation)
    end = each.start + each.count
    tokens = each.row.seq.tokens.view()[end - len(logits) + 1 : end + 1].tolist()
    top = each.row.params.top_logprobs
    return [
        token_logprob(torch.log_softmax(row, dim=-1), token, top) for row, token in zip(logits, tokens, strict=False)
    ]


def likeliest(logits: torch.Tensor, first: int, positions: Container[int], num_top: int) -> dict[int, TopLogprobs]:
    """{position: its `num_top` likeliest tokens with their logprobs}. logits [n, V] of positions from `first` on."""
    found: dict[int, TopLogprobs] = {}
    for offset in range(len(logits)):
        if first + offset in positions:
            found[first + offset] = top_logprobs(torch.log_softmax(logits[offset], dim=-1), num_top)
    return found


def top_logprobs(logprobs: torch.Tensor, num_top: int) -> TopLogprobs:
    """The `num_top` largest of logprobs [V], falling."""
    values, ids = torch.topk(logprobs, min(num_top, len(logprobs)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def token_logprob(logprobs: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """The token's entry of logprobs [V], and the `num_top` largest."""
    return TokenLogprob(token, float(logprobs[token]), top_logprobs(logprobs, num_top) if num_top else [])
