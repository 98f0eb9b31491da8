"""The scheduler: one step is receive, choose a batch, compute it, mask, sample, commit.

Whatever one request raises ends that request; the loop and its neighbours go on.

Knows: the order of a step. Must not know: sockets, how a batch is computed, or what instructions mean.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import msgspec
import numpy as np

from plait.constrained import CompilePool, GrammarError, Vocabulary
from plait.runtime.config import EngineConfig
from plait.runtime.flight import DeviceSteps, Launcher
from plait.runtime.messages import (
    Abort,
    FlushCache,
    Hello,
    Inspect,
    Open,
    Reply,
    Request,
    Status,
    TokenLogprob,
    Welcome,
)
from plait.runtime.running import Runner
from plait.runtime.sampler import NO_TOKEN, NOT_FINITE, Mask, Sampled, Sampler
from plait.runtime.scheduler.embedding import Embedding
from plait.runtime.scheduler.generating import Ending, Generating, few_bits
from plait.runtime.scheduler.policy import Policy
from plait.runtime.scheduler.prefix_cache import PrefixCache
from plait.runtime.scheduler.rows import Batch, BatchRow, Generation, Row, Scoring
from plait.runtime.scheduler.session import ClientId
from plait.runtime.scheduler.sessions import Sessions
from plait.runtime.scheduler.under_way import Foresight, UnderWay

MAX_CONSTRAINT_S = 0.1  # CPU time that one row's mask or matcher may take in a step
NARROW = 1024  # a mask with at most so many tokens: only their logits are computed


class Link(Protocol):
    """The scheduler's end of its channels."""

    num_bad_frames: int

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[ClientId, Request]]:
        """What has come; waits up to `timeout_s` seconds (None: without end) if nothing has, or a fd is readable."""

    def gone(self) -> list[ClientId]:
        """Clients that vanished or said goodbye since the last call."""

    def send(self, client: ClientId, reply: Reply) -> None:
        """Sends without waiting; a client that is gone is no error."""

    @property
    def num_clients(self) -> int: ...


class Scheduler:
    """One model, its KV pool, and every session of every client."""

    def __init__(
        self,
        config: EngineConfig,
        welcome: Welcome,
        model_runner: Runner,
        sampler: Sampler,
        vocabulary: Vocabulary,
        compiler: CompilePool,
        link: Link,
        device_steps: DeviceSteps | None = None,
    ) -> None:
        self.config, self.welcome, self.link = config, welcome, link
        self.model_runner, self.launcher = model_runner, Launcher(model_runner, sampler, device_steps)
        self.compiler = compiler
        self.cache = PrefixCache(model_runner.num_pages)
        self.policy = Policy(
            self.cache,
            model_runner.max_batch_tokens,
            config.max_batch_rows,
            welcome.context_length,
            draft=config.prompt_lookup and device_steps is None,
            order=config.order,
        )
        self.generating = Generating(vocabulary, self.cache, welcome.context_length)
        self.sessions = Sessions(self.policy, compiler, vocabulary, config, self.generating, welcome, link.send)
        self.calls = self.sessions.calls
        self._mask_words = (len(vocabulary) + 31) // 32
        self.under_way: UnderWay | None = None  # launched, and its tokens not yet taken in
        self.foresight = Foresight()
        self.num_steps = self.num_computed_tokens = 0

    def step(self, timeout_s: float | None = None) -> None:
        """Does one step of work; with none to do, waits up to `timeout_s` seconds for a message."""
        self.receive(timeout_s)
        if not self._may_run_ahead():
            self.settle()
        batch = self.policy.next_batch()
        step = self.launch(batch) if batch is not None else None  # a GPU goes on while the host
        self.settle(later=step)  #                                  takes in the step before
        if step is not None:
            self.sample(step)  #                                    and fills masks
        if self.under_way is not None and self.under_way.is_here:
            self.settle()
        if self.config.check_integrity:
            self.cache.check_integrity(self.sessions.sequences())

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute or to collect."""
        return self.under_way is not None or self.policy.has_work

    # -- the parts of a step ------------------------------------------------------------------------

    def _may_run_ahead(self) -> bool:
        """Whether the next step may be launched before the one under way is settled: where its tokens stay on the
        device, no row need be retracted for it, and few rows turn out to have ended or jumped forward."""
        step = self.under_way
        if step is None or step.flight is None or not step.flight.can_be_followed or not self.foresight.pays:
            return False
        return self.cache.num_available >= self.policy.max_batch_tokens

    def launch(self, batch: Batch) -> UnderWay:
        """Begins the batch's forward, if that can be done now."""
        step = UnderWay(batch, self.policy.new_nodes)
        step.launch(self.launcher, self.under_way)
        return step

    def settle(self, later: UnderWay | None = None) -> None:
        """Waits for the tokens of the step under way and commits them. `later`: a step that was launched behind it."""
        step, self.under_way = self.under_way, None
        if step is None:
            return
        try:
            assert step.flight is not None
            sampled = step.flight.collect()
        except Exception as error:
            self._fail_steps(error, *([] if later is None else [later]), step)
            return
        may_be_followed = step.flight.can_be_followed
        expecting = step.expecting(self.welcome.context_length) if may_be_followed else []
        step.end(self.cache)
        self.commit(step.batch, sampled)
        if not expecting and later is None:
            return
        running = self.policy.running
        self.foresight.learn(len(expecting), sum(gen in running and gen.num_pending == 1 for gen in expecting))
        if later is not None:
            later.resolve(self.cache, running)

    def sample(self, step: UnderWay) -> None:
        """Fills the masks and starts the sampler behind the forward, which begins now where it could not before."""
        if step.is_pointless:
            step.end(self.cache)
        if step.is_over:
            return
        try:
            flight = step.begun(self.launcher)
            flight.sample(self.fill_token_mask(step))
        except Exception as error:
            self._fail_steps(error, step)
            return
        self.under_way = step
        if not step.is_here:
            step.await_tokens()

    # -- receive ----------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None) -> None:
        """Takes in messages, compiled grammars, deadlines and vanished clients."""
        wait_s = 0.0 if self.has_work else self._until_next_event(timeout_s)
        for client, request in self.link.receive(wait_s, self.compiler.filenos()):
            try:
                self._handle(client, request)
            except Exception as error:  # a fault of ours in one request must not end the others
                self.sessions.faults.tell(error)
                self.sessions.drop_after_fault(client, request)
        self.sessions.take_compiled()
        self.sessions.fail_late_calls()
        for client in self.link.gone():
            try:
                self.sessions.drop_client(client)
            except Exception as error:
                self.sessions.faults.tell(error)

    def _until_next_event(self, timeout_s: float | None) -> float | None:
        events = [at for at in (self.calls.deadlines.next(), self.compiler.next_deadline()) if at is not None]
        waits = [max(0.0, at - time.monotonic()) for at in events]
        return min([*waits, *([] if timeout_s is None else [timeout_s])], default=None)

    def _handle(self, client: ClientId, request: Request) -> None:
        if isinstance(request, Hello):
            self.link.send(client, self.welcome)
        elif isinstance(request, Open):
            self.sessions.open(client, request)
        elif isinstance(request, Abort):
            self.sessions.abort(client, request)
        elif isinstance(request, (Inspect, FlushCache)):
            if isinstance(request, FlushCache):
                self.cache.flush()
            self.link.send(client, self.status(request.call))
        else:
            self.sessions.enqueue(client, request)

    def status(self, call_id: int) -> Status:
        """Counts as they are now."""
        free, cached, held = self.cache.counts()
        totals = self.calls.totals.with_unfinished((*self.policy.running, *self.policy.waiting))
        return Status(
            call_id,
            sessions=len(self.sessions),
            clients=self.link.num_clients,
            running_calls=len(self.policy.running),
            waiting_calls=len(self.policy.waiting) + self.calls.num_compiling,
            free_pages=free,
            cached_pages=cached,
            held_pages=held,
            total_pages=self.cache.pool.total,
            steps=self.num_steps,
            computed_tokens=self.num_computed_tokens,
            retractions=self.policy.num_retractions,
            bad_frames=self.link.num_bad_frames,
            spared_tokens=self.model_runner.num_spared_tokens,
            **msgspec.structs.asdict(totals),
        )

    # -- mask and commit --------------------------------------------------------------------------

    def fill_token_mask(self, step: UnderWay) -> Mask | None:
        """The packed masks of the rows that are not free, with each one's index among the sampled rows."""
        rows, masks, narrow = [], [], {}
        for index, (at, gen) in enumerate(step.sampled):
            if gen.matcher is None and not gen.params.min_tokens:  # nearly all
                continue
            if self.generating.is_free(gen) or gen in step.passed_over:
                continue
            words = np.empty(self._mask_words, dtype=np.int32)
            begun = time.thread_time()
            try:
                if not self.generating.fill_mask(gen, words):
                    continue
                _check_cost(time.thread_time() - begun)
            except Exception as error:  # a matcher that breaks in the middle ends its own call
                self.calls.fail(gen, "constraint", f"the constraint broke in the middle: {error}")
                continue
            rows.append(index)
            masks.append(words)
            if not (self.config.deterministic or gen.params.logprobs):
                ids = few_bits(words, NARROW)
                if ids is not None:
                    narrow[at] = ids
        return Mask(rows, np.stack(masks), narrow) if rows else None

    def commit(self, batch: Batch, sampled: Sampled) -> None:
        """Hands each row its results; a row that was ended meanwhile is passed over."""
        self.num_steps += 1
        self.num_computed_tokens += batch.num_tokens
        for each in batch.rows:
            if each.row not in self.policy.running:
                continue
            try:
                self._commit_row(each, sampled)
            except Exception as error:
                self.sessions.faults.tell(error)
                self._fail_row(each.row, "internal", f"this call broke ({type(error).__name__}); see the runtime's log")

    def _commit_row(self, each: BatchRow, sampled: Sampled) -> None:
        row = each.row
        if isinstance(row, Generation):
            if sampled.prompt_logprobs and row in sampled.prompt_logprobs:
                assert row.prompt_logprobs is not None
                row.prompt_logprobs += sampled.prompt_logprobs[row]
                row.logits_from = min(each.start + each.count, len(row.seq) - 1)
            if each.num_draft:
                self._commit_drafted(row, each.num_draft, sampled.drafted[row])
            elif each.is_sampled and each.is_current:
                self._commit_token(row, sampled.tokens[row], sampled.logprobs.get(row))
        elif isinstance(row, Scoring):
            self._commit_scores(row, sampled)
        elif isinstance(row, Embedding):
            if each.num_states:
                row.take(sampled.states[row], each.start + each.count)
            if not row.num_pending:
                self.calls.finish_embedding(row)

    def _commit_scores(self, row: Scoring, sampled: Sampled) -> None:
        scores = sampled.scores.get(row, {})
        if not all(math.isfinite(logprob) or logprob == -math.inf for logprob in scores.values()):
            self.calls.fail(row.selection, "internal", "the model's logits are not finite here")
            return
        row.logprobs.update(scores)
        row.top.update(sampled.tops.get(row, {}))
        if not row.num_pending:
            self.calls.finish_row(row)

    def _commit_drafted(self, gen: Generation, num_draft: int, tokens: list[int]) -> None:
        """Takes the tokens that the model chose, up to the first that was not guessed."""
        guesses, right = gen.seq.tokens.view()[-num_draft:].tolist(), 0
        gen.drop_draft()
        base = len(gen.seq)
        while right < num_draft and tokens[right] == guesses[right]:
            right += 1
        assert gen.lookup is not None
        gen.lookup.learn(num_draft, right)
        self.cache.truncate(gen.seq, base + right)  # what the wrong guesses filled
        for token in tokens[: right + 1]:
            gen.num_drafted += right > 0
            right -= 1
            self._commit_token(gen, token, None)
            if gen not in self.policy.running:
                return

    def _commit_token(self, gen: Generation, token: int, logprob: TokenLogprob | None) -> None:
        if not gen.meter.first_token:
            gen.meter.first_token = time.monotonic()
        if gen.params.max_tokens == 0:
            self.calls.finish_generation(gen, Ending("length"))
            return
        if token < 0:
            self._fail_token(gen, token)
            return
        begun = 0.0 if gen.matcher is None else time.thread_time()  # a system call
        try:
            ending = self.generating.take(gen, token, logprob)
            if gen.matcher is not None and ending is None:
                _check_cost(time.thread_time() - begun)
        except (RuntimeError, GrammarError) as error:
            self.calls.fail(gen, "constraint", str(error))
            return
        if ending is not None:
            self.calls.finish_generation(gen, ending)
        else:
            self.calls.send_tokens(gen, gen.num_safe_tokens())

    def _fail_token(self, gen: Generation, token: int) -> None:
        if token == NO_TOKEN:
            self.calls.fail(gen, "constraint", "no token of the vocabulary can continue this constraint")
        else:
            assert token == NOT_FINITE
            self.calls.fail(gen, "internal", "the model's logits are not finite here")

    def _fail_row(self, row: Row, kind: str, text: str) -> None:
        assert isinstance(row, (Generation, Scoring, Embedding))
        self.calls.fail(row.selection if isinstance(row, Scoring) else row, kind, text)

    def _fail_steps(self, error: Exception, *steps: UnderWay) -> None:
        """The steps, the latest first, broke: their rows fail, and what they were about to write leaves the tree."""
        self.sessions.faults.tell(error)
        rows = [each.row for step in steps for each in step.batch.rows]
        for step in steps:
            step.end(self.cache)
            step.batch.keep([])
        for row in rows:
            row.drop_draft()
            self.cache.reset(row.seq)
        for row in [row for row in self.policy.running if row not in rows]:
            self.policy.retract(row)  # it may stand on what goes now, taken over before there was no room for it
        for step in steps:
            for node, num_tokens in step.new_nodes:
                self.cache.void(node, num_tokens)
        for row in rows:
            text = f"the model could not compute this step ({type(error).__name__}: {error!s:.200})"
            self._fail_row(row, "internal", text)


def _check_cost(spent_s: float) -> None:
    """RuntimeError for a constraint that holds up its neighbours: `spent_s` are this thread's own CPU seconds."""
    if spent_s > MAX_CONSTRAINT_S:
        raise RuntimeError(
            f"one token of this constraint took {spent_s * 1e3:.0f} ms; {MAX_CONSTRAINT_S * 1e3:.0f} are allowed"
        )
