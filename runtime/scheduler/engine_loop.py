"""The scheduler: one step is receive, choose a batch, compute it, mask, sample, commit.

Whatever one request raises ends that request; the loop and its neighbours go on.

Knows: the order of a step. Must not know: sockets, how a batch is computed, or what instructions mean.
"""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np

from plait.constrained import CompilePool, GrammarError, Vocabulary
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import Batch, GenerationRequest, Request, ScheduledRequest, ScoringRequest
from plait.runtime.config import EngineConfig
from plait.runtime.executor.runner import Runner
from plait.runtime.executor.step import AsyncStepLauncher, StepExecutor
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import (
    Abort,
    ClientMessage,
    FlushCache,
    Hello,
    Inspect,
    Open,
    Status,
    TokenLogprob,
    Welcome,
)
from plait.runtime.sampling.sampler import NO_TOKEN, NOT_FINITE, Sampler, SamplerOutput, TokenMask
from plait.runtime.scheduler.batching import BatchScheduler
from plait.runtime.scheduler.output_processor import FinishInfo, OutputProcessor, set_bits_up_to
from plait.runtime.scheduler.overlap import OverlapController, OverlappedStep
from plait.runtime.scheduler.sessions.session_manager import SessionManager
from plait.runtime.transport.base import ClientId, ServerTransport

MAX_CONSTRAINT_CPU_S = 0.1  # CPU time that one row's mask or matcher may take in a step
MAX_PARTIAL_HEAD_TOKENS = 1024  # a mask with at most so many tokens: only their logits are computed


class EngineLoop:
    """One model, its KV pool, and every session of every client."""

    def __init__(
        self,
        config: EngineConfig,
        welcome: Welcome,
        model_runner: Runner,
        sampler: Sampler,
        vocabulary: Vocabulary,
        compiler: CompilePool,
        transport: ServerTransport,
        async_launcher: AsyncStepLauncher | None = None,
    ) -> None:
        self.config, self.welcome, self.transport = config, welcome, transport
        self.model_runner, self.step_executor = model_runner, StepExecutor(model_runner, sampler, async_launcher)
        self.compiler = compiler
        self.cache = PrefixCache(model_runner.num_pages)
        self.batch_scheduler = BatchScheduler(
            self.cache,
            model_runner.max_batch_tokens,
            config.max_batch_rows,
            welcome.context_length,
            draft=config.prompt_lookup and async_launcher is None,
            order=config.order,
        )
        self.output_processor = OutputProcessor(vocabulary, self.cache, welcome.context_length)
        self.sessions = SessionManager(
            self.batch_scheduler, compiler, vocabulary, config, self.output_processor, welcome, transport.send
        )
        self.calls = self.sessions.calls
        self._mask_words = (len(vocabulary) + 31) // 32
        self.pending_step: OverlappedStep | None = None  # launched, and its tokens not yet taken in
        self.overlap_controller = OverlapController()
        self.num_steps = self.num_computed_tokens = 0

    def step(self, timeout_s: float | None = None) -> None:
        """Does one step of work; with none to do, waits up to `timeout_s` seconds for a message."""
        self.receive(timeout_s)
        if not self._may_overlap():
            self.commit_pending_step()
        batch = self.batch_scheduler.next_batch()
        step = self.launch(batch) if batch is not None else None  # a GPU goes on while the host
        self.commit_pending_step(overlapped=step)  #                                  takes in the step before
        if step is not None:
            self.sample(step)  #                                    and fills masks
        if self.pending_step is not None and self.pending_step.is_complete:
            self.commit_pending_step()
        if self.config.check_integrity:
            self.cache.check_integrity(self.sessions.sequences())

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute or to collect."""
        return self.pending_step is not None or self.batch_scheduler.has_work

    # -- the parts of a step ------------------------------------------------------------------------

    def _may_overlap(self) -> bool:
        """Whether the next step may be launched before the one under way is settled: where its tokens stay on the
        device, no row need be retracted for it, and few rows turn out to have ended or jumped forward."""
        step = self.pending_step
        if (
            step is None
            or step.in_flight is None
            or not step.in_flight.can_overlap
            or not self.overlap_controller.is_worthwhile
        ):
            return False
        return self.cache.num_available >= self.batch_scheduler.max_batch_tokens

    def launch(self, batch: Batch) -> OverlappedStep:
        """Begins the batch's forward, if that can be done now."""
        step = OverlappedStep(batch, self.batch_scheduler.provisional_nodes)
        step.launch(self.step_executor, self.pending_step)
        return step

    def commit_pending_step(self, overlapped: OverlappedStep | None = None) -> None:
        """Waits for the tokens of the step under way and commits them. `overlapped`: a step that was launched behind it."""
        step, self.pending_step = self.pending_step, None
        if step is None:
            return
        try:
            assert step.in_flight is not None
            sampled = step.in_flight.collect()
        except Exception as error:
            self._fail_steps(error, *([] if overlapped is None else [overlapped]), step)
            return
        may_be_followed = step.in_flight.can_overlap
        expecting = step.continuing_requests(self.welcome.context_length) if may_be_followed else []
        step.finish(self.cache)
        self.commit(step.batch, sampled)
        if not expecting and overlapped is None:
            return
        running = self.batch_scheduler.running
        self.overlap_controller.record_outcome(
            len(expecting), sum(gen in running and gen.num_pending == 1 for gen in expecting)
        )
        if overlapped is not None:
            overlapped.resolve_placeholders(self.cache, running)

    def sample(self, step: OverlappedStep) -> None:
        """Fills the masks and starts the sampler behind the forward, which begins now where it could not before."""
        if step.is_empty:
            step.finish(self.cache)
        if step.is_finished:
            return
        try:
            in_flight = step.ensure_launched(self.step_executor)
            in_flight.sample(self.fill_token_mask(step))
        except Exception as error:
            self._fail_steps(error, step)
            return
        self.pending_step = step
        if not step.is_complete:
            step.mark_in_flight()

    # -- receive ----------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None) -> None:
        """Takes in messages, compiled grammars, deadlines and vanished clients."""
        wait_s = 0.0 if self.has_work else self._until_next_event(timeout_s)
        for client, message in self.transport.receive(wait_s, self.compiler.filenos()):
            try:
                self._handle(client, message)
            except Exception as error:  # a fault of ours in one request must not end the others
                self.sessions.error_log.record(error)
                self.sessions.drop_after_error(client, message)
        self.sessions.start_compiled_calls()
        self.sessions.fail_expired_calls()
        for client in self.transport.take_disconnected():
            try:
                self.sessions.drop_client(client)
            except Exception as error:
                self.sessions.error_log.record(error)

    def _until_next_event(self, timeout_s: float | None) -> float | None:
        events = [at for at in (self.calls.deadlines.next(), self.compiler.next_deadline()) if at is not None]
        waits = [max(0.0, at - time.monotonic()) for at in events]
        return min([*waits, *([] if timeout_s is None else [timeout_s])], default=None)

    def _handle(self, client: ClientId, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self.transport.send(client, self.welcome)
        elif isinstance(message, Open):
            self.sessions.open(client, message)
        elif isinstance(message, Abort):
            self.sessions.abort(client, message)
        elif isinstance(message, (Inspect, FlushCache)):
            if isinstance(message, FlushCache):
                self.cache.flush()
            self.transport.send(client, self.status(message.call))
        else:
            self.sessions.enqueue(client, message)

    def status(self, call_id: int) -> Status:
        """Counts as they are now."""
        free, cached, held = self.cache.counts()
        totals = self.calls.totals.with_running((*self.batch_scheduler.running, *self.batch_scheduler.waiting))
        return Status(
            call_id,
            sessions=len(self.sessions),
            clients=self.transport.num_clients,
            running_calls=len(self.batch_scheduler.running),
            waiting_calls=len(self.batch_scheduler.waiting) + self.calls.num_compiling,
            free_pages=free,
            cached_pages=cached,
            held_pages=held,
            total_pages=self.cache.pool.total,
            steps=self.num_steps,
            computed_tokens=self.num_computed_tokens,
            retractions=self.batch_scheduler.num_retractions,
            bad_frames=self.transport.num_bad_frames,
            spared_tokens=self.model_runner.num_spared_tokens,
            **msgspec.structs.asdict(totals),
        )

    # -- mask and commit --------------------------------------------------------------------------

    def fill_token_mask(self, step: OverlappedStep) -> TokenMask | None:
        """The packed masks of the rows that are not free, with each one's index among the sampled rows."""
        rows, masks, allowed_ids = [], [], {}
        for index, (at, gen) in enumerate(step.sampled_requests):
            if gen.matcher is None and not gen.params.min_tokens:  # nearly all
                continue
            if self.output_processor.needs_no_mask(gen) or gen in step.discarded:
                continue
            words = np.empty(self._mask_words, dtype=np.int32)
            begun = time.thread_time()
            try:
                if not self.output_processor.fill_mask(gen, words):
                    continue
                _check_cost(time.thread_time() - begun)
            except Exception as error:  # a matcher that breaks in the middle ends its own call
                self.calls.fail(gen, "constraint", f"the constraint broke in the middle: {error}")
                continue
            rows.append(index)
            masks.append(words)
            if not (self.config.deterministic or gen.params.logprobs):
                ids = set_bits_up_to(words, MAX_PARTIAL_HEAD_TOKENS)
                if ids is not None:
                    allowed_ids[at] = ids
        return TokenMask(rows, np.stack(masks), allowed_ids) if rows else None

    def commit(self, batch: Batch, sampled: SamplerOutput) -> None:
        """Hands each row its results; a row that was ended meanwhile is passed over."""
        self.num_steps += 1
        self.num_computed_tokens += batch.num_tokens
        for each in batch.rows:
            if each.request not in self.batch_scheduler.running:
                continue
            try:
                self._commit_request(each, sampled)
            except Exception as error:
                self.sessions.error_log.record(error)
                self._fail_request(
                    each.request, "internal", f"this call broke ({type(error).__name__}); see the runtime's log"
                )

    def _commit_request(self, each: ScheduledRequest, sampled: SamplerOutput) -> None:
        request = each.request
        if isinstance(request, GenerationRequest):
            if sampled.prompt_logprobs and request in sampled.prompt_logprobs:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs += sampled.prompt_logprobs[request]
                request.logits_from = min(each.start + each.count, len(request.seq) - 1)
            if each.num_draft_tokens:
                self._commit_verified_draft(request, each.num_draft_tokens, sampled.verified[request])
            elif each.is_sampled and each.is_still_next:
                self._commit_token(request, sampled.tokens[request], sampled.logprobs.get(request))
        elif isinstance(request, ScoringRequest):
            self._commit_scores(request, sampled)
        elif isinstance(request, PoolingRequest):
            if each.num_states:
                request.add_hidden_states(sampled.states[request], each.start + each.count)
            if not request.num_pending:
                self.calls.finish_embedding(request)

    def _commit_scores(self, request: ScoringRequest, sampled: SamplerOutput) -> None:
        scores = sampled.scores.get(request, {})
        if not all(math.isfinite(logprob) or logprob == -math.inf for logprob in scores.values()):
            self.calls.fail(request.selection, "internal", "the model's logits are not finite here")
            return
        request.logprobs.update(scores)
        request.top.update(sampled.top_logprobs.get(request, {}))
        if not request.num_pending:
            self.calls.finish_scoring(request)

    def _commit_verified_draft(self, gen: GenerationRequest, num_draft_tokens: int, tokens: list[int]) -> None:
        """Takes the tokens that the model chose, up to the first that was not guessed."""
        guesses, right = gen.seq.tokens.view()[-num_draft_tokens:].tolist(), 0
        gen.drop_draft()
        base = len(gen.seq)
        while right < num_draft_tokens and tokens[right] == guesses[right]:
            right += 1
        assert gen.ngram_proposer is not None
        gen.ngram_proposer.record_outcome(num_draft_tokens, right)
        self.cache.truncate(gen.seq, base + right)  # what the wrong guesses filled
        for token in tokens[: right + 1]:
            gen.num_accepted_drafts += right > 0
            right -= 1
            self._commit_token(gen, token, None)
            if gen not in self.batch_scheduler.running:
                return

    def _commit_token(self, gen: GenerationRequest, token: int, logprob: TokenLogprob | None) -> None:
        if not gen.metrics.first_token_time:
            gen.metrics.first_token_time = time.monotonic()
        if gen.params.max_tokens == 0:
            self.calls.finish_generation(gen, FinishInfo("length"))
            return
        if token < 0:
            self._fail_token(gen, token)
            return
        begun = 0.0 if gen.matcher is None else time.thread_time()  # a system call
        try:
            finish_info = self.output_processor.process_token(gen, token, logprob)
            if gen.matcher is not None and finish_info is None:
                _check_cost(time.thread_time() - begun)
        except (RuntimeError, GrammarError) as error:
            self.calls.fail(gen, "constraint", str(error))
            return
        if finish_info is not None:
            self.calls.finish_generation(gen, finish_info)
        else:
            self.calls.send_tokens(gen, gen.num_safe_tokens())

    def _fail_token(self, gen: GenerationRequest, token: int) -> None:
        if token == NO_TOKEN:
            self.calls.fail(gen, "constraint", "no token of the vocabulary can continue this constraint")
        else:
            assert token == NOT_FINITE
            self.calls.fail(gen, "internal", "the model's logits are not finite here")

    def _fail_request(self, request: Request, kind: str, text: str) -> None:
        assert isinstance(request, (GenerationRequest, ScoringRequest, PoolingRequest))
        self.calls.fail(request.selection if isinstance(request, ScoringRequest) else request, kind, text)

    def _fail_steps(self, error: Exception, *steps: OverlappedStep) -> None:
        """The steps, the latest first, broke: their rows fail, and what they were about to write leaves the tree."""
        self.sessions.error_log.record(error)
        rows = [each.request for step in steps for each in step.batch.rows]
        for step in steps:
            step.finish(self.cache)
            step.batch.set_rows([])
        for request in rows:
            request.drop_draft()
            self.cache.reset(request.seq)
        for request in [request for request in self.batch_scheduler.running if request not in rows]:
            self.batch_scheduler.retract(
                request
            )  # it may stand on what goes now, taken over before there was no room for it
        for step in steps:
            for node, num_tokens in step.provisional_nodes:
                self.cache.rollback_insert(node, num_tokens)
        for request in rows:
            text = f"the model could not compute this step ({type(error).__name__}: {error!s:.200})"
            self._fail_request(request, "internal", text)


def _check_cost(spent_s: float) -> None:
    """RuntimeError for a constraint that holds up its neighbours: `spent_s` are this thread's own CPU seconds."""
    if spent_s > MAX_CONSTRAINT_CPU_S:
        raise RuntimeError(
            f"one token of this constraint took {spent_s * 1e3:.0f} ms; {MAX_CONSTRAINT_CPU_S * 1e3:.0f} are allowed"
        )
