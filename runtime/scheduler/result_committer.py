"""Commits the results of a step to its requests: tokens, verified drafts, scores, states and probabilities.

An error in one request ends that request; the others continue.
"""

from __future__ import annotations

import math
import time

from plait.constrained import GrammarError
from plait.runtime.arrays import Float32Array
from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import FinishInfo, GenerationRequest, Request, ScoringRequest
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.drafts.draft import FORCED
from plait.runtime.sampling.logit_ops import NO_TOKEN, NOT_FINITE
from plait.runtime.sampling.sampler import SamplerOutput
from plait.runtime.scheduler.sequence_sampling.prefix_requests import PrefixRequest, call_of
from plait.runtime.scheduler.sessions.session_manager import SessionManager
from plait.runtime.scheduler.token_mask import ConstraintCpuLimit

LOGITS_NOT_FINITE = "the model's logits are not finite here"


class ResultCommitter:
    """Commits what the sampler returned for a batch, and ends the calls that are complete."""

    def __init__(self, sessions: SessionManager) -> None:
        self._cache, self._batch_scheduler = sessions.cache, sessions.batch_scheduler
        self._output_processor, self._error_log = sessions.output_processor, sessions.error_log
        self._sessions, self._calls = sessions, sessions.calls

    def commit(self, batch: Batch, output: SamplerOutput) -> None:
        """Commits the results of each request in the batch. Skips requests that ended while the step was computed."""
        for scheduled in batch.rows:
            if scheduled.request not in self._batch_scheduler.running:
                continue
            try:
                self._commit_request(scheduled, output)
            except Exception as error:
                self._error_log.record(error)
                text = f"an internal error ended this call ({type(error).__name__}); see the runtime's log"
                self.fail_request(scheduled.request, "internal", text)
            if self._batch_scheduler.isolated:
                self._batch_scheduler.end_isolation(scheduled.request)

    def _commit_request(self, scheduled: ScheduledRequest, output: SamplerOutput) -> None:
        request = scheduled.request
        if isinstance(request, GenerationRequest):
            if output.prompt_logprobs and request in output.prompt_logprobs:
                assert request.prompt_logprobs is not None
                first = scheduled.start + scheduled.count - scheduled.num_logits
                # A request that was retracted while the previous step was in flight has computed positions twice.
                request.prompt_logprobs += output.prompt_logprobs[request][max(0, request.logits_from - first) :]
                request.logits_from = min(scheduled.start + scheduled.count, len(request.seq) - 1)
            if scheduled.num_draft_tokens:
                self._commit_verified_draft(request, output)
            elif isinstance(request, PrefixRequest):
                self._commit_probabilities(scheduled, request, output.probabilities.get(request, []))
            elif scheduled.is_sampled and scheduled.is_still_next:
                self._commit_token(request, output.tokens[request], output.logprobs.get(request))
        elif isinstance(request, ScoringRequest):
            self._commit_scores(request, output, is_last=scheduled.is_still_next)
        elif isinstance(request, PoolingRequest):
            if scheduled.num_states:
                request.add_hidden_states(output.states[request], scheduled.start + scheduled.count)
            if scheduled.is_still_next:  # the step has computed the last token
                self._calls.finish_embedding(request)

    def _commit_scores(self, request: ScoringRequest, output: SamplerOutput, is_last: bool) -> None:
        scores = output.scores.get(request, {})
        if not all(math.isfinite(logprob) or logprob == -math.inf for logprob in scores.values()):
            self._calls.fail(request.selection, "internal", LOGITS_NOT_FINITE)
            return
        request.logprobs.update(scores)
        request.top.update(output.top_logprobs.get(request, {}))
        if is_last:
            self._calls.finish_scoring(request)

    def _commit_verified_draft(self, request: GenerationRequest, output: SamplerOutput) -> None:
        """Commits the accepted draft tokens and the one sampled after them."""
        draft, tokens, logprobs = request.draft, output.verified[request], output.verified_logprobs.get(request)
        assert draft is not None
        num_accepted = draft.num_accepted(tokens)
        request.drop_draft()
        length = len(request.seq)
        self._cache.truncate(request.seq, length + num_accepted)  # frees the pages of rejected tokens
        for position in range(num_accepted + 1):
            if draft.draws[position] == FORCED:
                continue  # committed with the token before it
            if len(request.seq) != length + position:
                return  # a completion plan has taken the last token back
            request.num_accepted_drafts += position < num_accepted
            self._commit_token(request, tokens[position], None if logprobs is None else logprobs[position])
            if request not in self._batch_scheduler.running:
                return

    def _commit_token(self, request: GenerationRequest, token: int, logprob: TokenLogprob | None) -> None:
        if not request.metrics.first_token_time:
            request.metrics.first_token_time = time.monotonic()
        if request.params.max_tokens == 0:
            self._calls.finish_generation(request, FinishInfo("length"))
            return
        if token < 0:
            self._fail_token(request, token)
            return
        try:
            if request.matcher is None:
                finish_info = self._output_processor.process_token(request, token, logprob)
            else:
                with ConstraintCpuLimit() as limit:
                    finish_info = self._output_processor.process_token(request, token, logprob)
                    limit.has_ended = finish_info is not None
        except (RuntimeError, GrammarError) as error:
            self._calls.fail(request, "constraint", str(error))
            return
        if finish_info is not None:
            self._calls.finish_generation(request, finish_info)
        else:
            self._calls.send_tokens(request, request.num_safe_tokens())

    def _commit_probabilities(
        self, scheduled: ScheduledRequest, request: PrefixRequest, rows: list[Float32Array | None]
    ) -> None:
        """Passes token probabilities to the call of a request that computes a prefix for it.

        rows: probabilities [V] after each of its last tokens; None if they are not finite.
        """
        finite = [row for row in rows if row is not None]
        call, end = request.call, scheduled.start + scheduled.count
        if end > request.seq.num_computed:  # the step computed a path that the request has left since
            return
        if len(finite) < len(rows):
            self._fail_token(call, NOT_FINITE)
            return
        request.rows |= dict(enumerate(finite, start=end - len(finite)))
        if not (scheduled.is_sampled and scheduled.is_still_next):
            request.logits_from = max(request.logits_from, end)
            return
        sampling = self._sessions.exact if call.params.exact else self._sessions.particles
        try:
            with ConstraintCpuLimit() as limit:
                finish_info = sampling.advance(request)
                limit.has_ended = finish_info is not None
        except (RuntimeError, GrammarError) as error:
            self._calls.fail(call, "constraint", str(error))
            return
        if finish_info is not None:
            self._calls.finish_generation(call, finish_info)

    def _fail_token(self, request: GenerationRequest, token: int) -> None:
        if token == NO_TOKEN:
            self._calls.fail(request, "constraint", "no token of the vocabulary can continue this constraint")
        else:
            assert token == NOT_FINITE
            self._calls.fail(request, "internal", LOGITS_NOT_FINITE)

    def fail_request(self, request: Request, kind: str, text: str) -> None:
        """Fails the call of a request."""
        assert isinstance(request, (GenerationRequest, ScoringRequest, PoolingRequest))
        if isinstance(request, GenerationRequest):
            self._calls.fail(call_of(request), kind, text)
        else:
            self._calls.fail(request.selection if isinstance(request, ScoringRequest) else request, kind, text)
