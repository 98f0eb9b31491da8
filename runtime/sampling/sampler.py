"""Samples, verifies and scores: turns the logits of one step into the results of its requests.

The result of a request depends only on its own logits, parameters, seed and step, never on the other requests of the
batch: every operation works along the last axis, and a draw uses one uniform number hashed from (seed, step).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import GenerationRequest, ScoringRequest
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.sampling.logit_ops import DrawState, LogitOperations, TokenMask, TopLogprobs, failed_token
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations


@dataclass
class SamplerOutput:
    """The results of one step: a token (or NO_TOKEN, NOT_FINITE) for each generation, and what else was requested."""

    tokens: dict[GenerationRequest, int] = field(default_factory=dict)
    logprobs: dict[GenerationRequest, TokenLogprob] = field(default_factory=dict)
    scores: dict[ScoringRequest, dict[tuple[int, int], float]] = field(default_factory=dict)
    top_logprobs: dict[ScoringRequest, dict[int, TopLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[GenerationRequest, list[TokenLogprob]] = field(default_factory=dict)
    verified: dict[GenerationRequest, list[int]] = field(default_factory=dict)  # one token more than the draft had
    verified_logprobs: dict[GenerationRequest, list[TokenLogprob]] = field(default_factory=dict)  # of each of them
    probabilities: dict[GenerationRequest, list[Float32Array | None]] = field(default_factory=dict)  # of whole values
    states: dict[PoolingRequest, Float32Array | Float64Array] = field(default_factory=dict)  # see add_hidden_states


class Sampler:
    """Computes on the host, or with the given `operations`."""

    def __init__(self, operations: LogitOperations | None = None) -> None:
        self.ops: LogitOperations = operations or NumpyLogitOperations()

    def sample(self, logits: Any, batch: Batch, mask: TokenMask | None) -> SamplerOutput:
        """Takes logits [batch.num_logits, V] float32 in row order, and may overwrite them."""
        logits, output, first_row = self.ops.prepare(logits), SamplerOutput(), 0
        for scheduled in batch.rows:
            rows = slice(first_row, first_row + scheduled.num_logits)
            first_row = rows.stop
            request = scheduled.request
            if isinstance(request, ScoringRequest) and scheduled.num_logits:
                self._score(logits[rows], scheduled, request, output)
            elif isinstance(request, GenerationRequest) and scheduled.num_draft_tokens:
                self._verify_draft(logits[rows], request, output)
            elif isinstance(request, GenerationRequest) and request.needs_probabilities:
                if scheduled.num_logits:
                    output.probabilities[request] = self.probabilities(logits[rows], request)
            elif isinstance(request, GenerationRequest) and scheduled.num_logits - scheduled.is_sampled > 0:
                output.prompt_logprobs[request] = self._prompt_logprobs(logits[rows], scheduled, request)
        sampled = batch.sampled_requests
        if sampled:
            sampled_logits = logits if len(sampled) == len(logits) else logits[[index for index, _ in sampled]]
            self._sample_generations(sampled_logits, [request for _, request in sampled], mask, output)
        return output

    def _score(self, logits: Any, scheduled: ScheduledRequest, request: ScoringRequest, output: SamplerOutput) -> None:
        first = scheduled.start + scheduled.count - scheduled.num_logits
        output.scores[request] = self.target_logprobs(logits, first, request.targets)
        num_top = request.selection.top_logprobs
        if num_top:
            output.top_logprobs[request] = self.top_logprobs_at(logits, first, request.targets, num_top)

    def probabilities(self, logits: Any, request: GenerationRequest) -> list[Float32Array | None]:
        """The probabilities [V] of each position of logits [n, V], without a constraint; None if not finite.

        Changes `logits` if the request has a bias.
        """
        if request.params.has_penalties_or_bias:
            for row in logits:
                self.ops.apply_penalties_and_bias(row, request)
        return [self.ops.probabilities(row, request) for row in logits]

    def _verify_draft(self, logits: Any, request: GenerationRequest, output: SamplerOutput) -> None:
        """Draws a token at each position of logits [1 + num_draft_tokens, V], as steps without a draft would.

        Where the constraint forces the draft's token, the mask leaves no other.
        """
        draft, params = request.draft, request.params
        assert draft is not None
        logprobs = self.ops.log_softmax(logits) if params.logprobs else None
        if params.has_penalties_or_bias:
            for position, row in enumerate(logits):
                self.ops.apply_penalties_and_bias(row, request, draft.tokens[:position])
        if draft.masks:
            self.ops.apply_mask(logits, TokenMask(list(draft.masks), np.stack(list(draft.masks.values())), {}))
        draws = [DrawState(params, request.seed, request.num_sampled + max(0, number)) for number in draft.draws]
        tokens = output.verified[request] = self.ops.draw_tokens(logits, draws)
        if logprobs is not None:
            output.verified_logprobs[request] = [
                self._token_logprob(row, max(0, token), params.top_logprobs)
                for row, token in zip(logprobs, tokens, strict=True)
            ]

    def _sample_generations(
        self, logits: Any, requests: list[GenerationRequest], mask: TokenMask | None, output: SamplerOutput
    ) -> None:
        """Draws a token from each row of logits [len(requests), V]. Logprobs are those of the unmodified logits."""
        rows_with_logprobs = [row for row, request in enumerate(requests) if request.params.logprobs]
        logprobs = self.ops.log_softmax(logits[rows_with_logprobs]) if rows_with_logprobs else None
        for row, request in enumerate(requests):
            if request.params.has_penalties_or_bias:
                self.ops.apply_penalties_and_bias(logits[row], request)
        if all(request.needs_probabilities for request in requests):
            return
        if mask is not None and mask.rows:
            self.ops.apply_mask(logits, mask)
        tokens = self.ops.draw_tokens(logits, requests)
        output.tokens |= zip(requests, tokens, strict=True)
        if logprobs is not None:
            for row_logprobs, row in zip(logprobs, rows_with_logprobs, strict=True):
                if tokens[row] >= 0:
                    request = requests[row]
                    output.logprobs[request] = self._token_logprob(
                        row_logprobs, tokens[row], request.params.top_logprobs
                    )

    def target_logprobs(
        self, logits: Any, first: int, targets: Mapping[int, Sequence[int]]
    ) -> dict[tuple[int, int], float]:
        """{(position, token): logprob} of the targets at positions [first, first + n) of logits [n, V]."""
        logprob_of: dict[tuple[int, int], float] = {}
        for position, row in enumerate(logits, start=first):
            tokens = targets.get(position)
            if tokens:
                logprobs = self.ops.values(self.ops.log_softmax(row), tokens)
                for token, logprob in zip(tokens, logprobs, strict=True):
                    logprob_of[position, token] = logprob
        return logprob_of

    def top_logprobs_at(
        self, logits: Any, first: int, positions: Mapping[int, object], num_top: int
    ) -> dict[int, TopLogprobs]:
        """{position: its `num_top` most likely tokens} of positions [first, first + n) of logits [n, V]."""
        return {
            position: self.ops.topk(self.ops.log_softmax(row), num_top)
            for position, row in enumerate(logits, start=first)
            if position in positions
        }

    def _prompt_logprobs(
        self, logits: Any, scheduled: ScheduledRequest, request: GenerationRequest
    ) -> list[TokenLogprob]:
        """Logprobs of the prompt tokens that follow the positions of logits [n, V]."""
        end = scheduled.start + scheduled.count
        tokens = request.seq.tokens.view()[end - len(logits) + 1 : end + 1].tolist()
        return [
            self._token_logprob(self.ops.log_softmax(row), token, request.params.top_logprobs)
            for row, token in zip(logits, tokens, strict=False)
        ]

    def _token_logprob(self, logprobs: Any, token: int, num_top: int) -> TokenLogprob:
        """The token's value in logprobs [V], and the `num_top` largest values."""
        top = self.ops.topk(logprobs, num_top) if num_top else []
        return TokenLogprob(token, self.ops.values(logprobs, [token])[0], top)


def argmax_output(peaks: list[float], tokens: list[int], batch: Batch) -> SamplerOutput:
    """What `Sampler.sample` returns for a batch with `needs_only_argmax`.

    `peaks`, `tokens`: the largest logit and its token for each of the batch's rows of logits.
    """
    if not all(map(math.isfinite, peaks)):
        tokens = [
            token if math.isfinite(peak) else failed_token(peak) for peak, token in zip(peaks, tokens, strict=True)
        ]
    output, first_row = SamplerOutput(), 0
    for scheduled in batch.rows:
        request = scheduled.request
        if not isinstance(request, GenerationRequest):
            continue
        if scheduled.num_draft_tokens:
            output.verified[request] = tokens[first_row : first_row + scheduled.num_logits]
        elif scheduled.is_sampled:
            output.tokens[request] = tokens[first_row]
        first_row += scheduled.num_logits
    return output
