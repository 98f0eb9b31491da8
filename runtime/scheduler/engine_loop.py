"""The engine loop. One step: receive messages, choose a batch, compute it, fill token masks, sample, commit.

An error in one request ends that request; the loop and the other requests continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from plait.constrained import CompilePool, Vocabulary
from plait.runtime.batch.batch import Batch
from plait.runtime.config import DEFAULT_BATCH_ROWS, EngineConfig
from plait.runtime.executor.runner import Runner
from plait.runtime.executor.step import AsyncStepLauncher, StepExecutor
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import (
    Abort,
    ClientMessage,
    FlushCache,
    Hello,
    Inspect,
    LoadAdapter,
    Open,
    Status,
    UnloadAdapter,
    WatchBlocks,
    Welcome,
)
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.scheduler.adapter_changes import AdapterChanges
from plait.runtime.scheduler.block_publisher import BlockPublisher
from plait.runtime.scheduler.error_log import ErrorLog
from plait.runtime.scheduler.output_processor import OutputProcessor
from plait.runtime.scheduler.overlap import OverlapController, OverlappedStep, discard_steps
from plait.runtime.scheduler.policy.batching import BatchScheduler
from plait.runtime.scheduler.policy.drafts import Drafter
from plait.runtime.scheduler.policy.guessing_model import GuessingModel
from plait.runtime.scheduler.result_committer import ResultCommitter
from plait.runtime.scheduler.sessions.session_manager import SessionManager
from plait.runtime.transport.base import ClientId, ServerTransport

COMPILER_INTERVAL = 16  # steps between two calls of the compile pool while no request waits for a grammar


class EngineLoop:
    """Runs one model for all sessions of all clients.

    With an `async_launcher` (a GPU), the device computes one step while the host processes the previous one; see
    `overlap.py`.
    """

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
        draft_model: GuessingModel[Any] | None = None,
    ) -> None:
        self.config, self.welcome, self.transport = config, welcome, transport
        self.model_runner, self.step_executor = model_runner, StepExecutor(model_runner, sampler, async_launcher)
        launcher_rows = DEFAULT_BATCH_ROWS if async_launcher is None else async_launcher.max_batch_rows
        self.compiler = compiler
        self.cache = PrefixCache(model_runner.num_pages)
        self.block_publisher = BlockPublisher(self.cache.tree, transport.send)
        self.error_log = ErrorLog()
        self.output_processor = OutputProcessor(vocabulary, self.cache, welcome.context_length)
        sources = config.drafts if config.prompt_lookup and async_launcher is None else ()
        token_masks = self.output_processor.token_masks
        drafter = Drafter(sources, token_masks, welcome.context_length, self.error_log, draft_model)
        self.batch_scheduler = BatchScheduler(
            self.cache,
            config,
            model_runner,
            config.max_batch_rows or launcher_rows,
            welcome.context_length,
            drafter,
            has_extra_steps=async_launcher is None,
        )
        self.sessions = SessionManager(
            self.batch_scheduler, compiler, config, self.output_processor, welcome, transport.send, self.error_log
        )
        self.calls = self.sessions.calls
        self.committer = ResultCommitter(self.sessions)
        self.adapters = AdapterChanges(
            model_runner.adapter_pool, transport.send, self._send_adapters, self._fail_requests_of
        )
        self.pending_step: OverlappedStep | None = None  # a launched step whose tokens are not committed yet
        self.overlap_controller = OverlapController()
        self.num_steps = self.num_computed_tokens = 0

    def step(self, timeout_s: float | None = None) -> None:
        """Does one step of work. If there is none, waits up to `timeout_s` seconds for a message."""
        self.receive(timeout_s)
        if not self._may_overlap():
            self.commit_pending_step()
        batch = self.batch_scheduler.next_batch()
        start_s = time.perf_counter()
        # A GPU computes the new step while the host commits the previous one and fills the masks of the new one.
        step = self.launch(batch) if batch is not None else None
        self.commit_pending_step(overlapped=step)
        if step is not None:
            self.sample(step)
        if step is not None and self.pending_step is step:
            self.batch_scheduler.drafter.record_step(step.batch, time.perf_counter() - start_s)
        if self.pending_step is not None and self.pending_step.is_complete:
            self.commit_pending_step()
        if self.block_publisher.is_watched:
            self.block_publisher.publish(time.monotonic())
        if self.config.check_integrity:
            self.cache.check_integrity(self.sessions.sequences())

    @property
    def has_work(self) -> bool:
        """Whether there is a request to compute or a step to commit."""
        return self.pending_step is not None or self.batch_scheduler.has_work

    # -- the parts of a step ------------------------------------------------------------------------

    def _may_overlap(self) -> bool:
        """Returns whether the next step may be launched before the pending one is committed.

        This requires that the pending step leaves its tokens on the device, that few results of such steps were
        discarded lately, and that the next step needs no retraction for its pages.
        """
        step = self.pending_step
        if step is None or step.in_flight is None or not step.in_flight.can_overlap:
            return False
        if not self.overlap_controller.is_worthwhile:
            return False
        return self.batch_scheduler.has_pages_for_next_batch()

    def launch(self, batch: Batch) -> OverlappedStep:
        """Starts the batch's forward pass. If it must wait for the pending step's tokens, `sample` starts it."""
        step = OverlappedStep(batch, self.batch_scheduler.inserted_nodes)
        step.launch(self.step_executor, self.pending_step)
        return step

    def commit_pending_step(self, overlapped: OverlappedStep | None = None) -> None:
        """Waits for the tokens of the pending step and commits them. `overlapped`: the step launched after it."""
        step, self.pending_step = self.pending_step, None
        if step is None:
            return
        try:
            assert step.in_flight is not None
            output = step.in_flight.collect()
        except Exception as error:
            self._recover(error, *([] if overlapped is None else [overlapped]), step)
            return
        expected = step.continuing_requests(self.welcome.context_length) if step.in_flight.can_overlap else []
        step.finish(self.cache)
        self.num_steps += 1
        self.num_computed_tokens += step.batch.num_tokens
        self.committer.commit(step.batch, output)
        if not expected and overlapped is None:
            return
        running = self.batch_scheduler.running
        num_continued = sum(request in running and request.num_pending == 1 for request in expected)
        self.overlap_controller.record_outcome(len(expected), num_continued)
        if overlapped is not None:
            overlapped.resolve_placeholders(self.cache, running)

    def sample(self, step: OverlappedStep) -> None:
        """Fills the token masks and starts the sampler. First launches the forward pass if `launch` could not."""
        if step.is_empty:
            step.finish(self.cache)
        if step.is_finished:
            return
        try:
            in_flight = step.ensure_launched(self.step_executor)
            in_flight.sample(self.fill_token_mask(step))
        except Exception as error:
            self._recover(error, step)
            return
        self.pending_step = step
        if not step.is_complete:
            step.mark_in_flight()

    def fill_token_mask(self, step: OverlappedStep) -> TokenMask | None:
        """Builds the step's token masks. Fails the requests whose constraint raises an error."""
        return self.output_processor.token_masks.build(
            step.sampled_requests,
            step.batch.drafted,
            step.discarded,
            partial_head=not self.config.deterministic,
            on_error=lambda request, error: self.calls.fail(
                request, "constraint", f"the constraint failed during generation: {error}"
            ),
        )

    # -- receive ----------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None) -> None:
        """Handles messages, compiled grammars, deadlines and disconnected clients.

        Deadlines come first, because `transport.receive` begins by sending replies.
        """
        self.sessions.fail_expired_calls()
        if self.has_work:
            received = self.transport.receive(0.0, [])
        else:
            wake_fds = [*self.compiler.filenos(), *self.adapters.filenos()]
            received = self.transport.receive(self._until_next_event(timeout_s), wake_fds)
        for client, message in received:
            if not self._succeeds(self._handle, client, message):
                self._succeeds(self.sessions.drop_after_error, client, message)
        self.adapters.collect()
        if not self.has_work or self.calls.num_compiling or self.num_steps % COMPILER_INTERVAL == 0:
            self.sessions.start_compiled_calls()
        for client in self.transport.take_disconnected():
            self.block_publisher.drop_client(client)
            self._succeeds(self.sessions.drop_client, client)

    def _succeeds(self, method: Callable[..., None], *given: object) -> bool:
        """Calls a method. An internal error in one request must not end the others: it is logged."""
        try:
            method(*given)
        except Exception as error:
            self.error_log.record(error)
            return False
        return True

    def _until_next_event(self, timeout_s: float | None) -> float | None:
        """Returns the seconds until the next deadline, compilation, block event or late adapter (None: no limit)."""
        deadlines = [self.calls.deadlines.next(), self.compiler.next_deadline(), self.block_publisher.next_due()]
        deadlines.append(self.adapters.next_deadline())
        waits = [max(0.0, deadline - time.monotonic()) for deadline in deadlines if deadline is not None]
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
                self.cache.flush(message.tenant)
                self.batch_scheduler.drafter.flush(message.tenant)
            self.transport.send(client, self.status(message.call))
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self.adapters.handle(client, message)
        elif isinstance(message, WatchBlocks):
            self.block_publisher.watch(client, message.snapshot, time.monotonic())
        else:
            self.sessions.enqueue(client, message)

    def close(self) -> None:
        """Ends the threads and processes that the loop has started, and keeps what the draft model has learnt."""
        self.batch_scheduler.drafter.close()
        self.compiler.close()
        self.adapters.close()

    def _send_adapters(self, client: ClientId, call_id: int) -> None:
        """Answers a client that has changed the names of adapters."""
        pool = self.adapters.pool
        assert pool is not None
        self.welcome = self.sessions.model = msgspec.structs.replace(self.welcome, adapters=dict(pool.names))
        self.transport.send(client, self.welcome)
        self.transport.send(client, self.status(call_id))

    def _fail_requests_of(self, adapter: str, kind: str, text: str) -> None:
        """Fails the waiting requests with an adapter that could not be read."""
        for request in [r for r in self.batch_scheduler.waiting if r.seq.namespace.adapter == adapter]:
            if request in self.batch_scheduler.waiting:  # it did not end with another one of its call
                self.committer.fail_request(request, kind, text)

    def status(self, call_id: int) -> Status:
        """Returns the current counters, as the reply to an Inspect message."""
        free, cached, used = self.cache.counts()
        totals = self.calls.totals.with_running((*self.batch_scheduler.running, *self.batch_scheduler.waiting))
        return Status(
            call_id,
            sessions=len(self.sessions),
            clients=self.transport.num_clients,
            running_calls=len(self.batch_scheduler.running),
            waiting_calls=len(self.batch_scheduler.waiting) + self.calls.num_compiling,
            free_pages=free,
            cached_pages=cached,
            used_pages=used,
            total_pages=self.cache.pool.total,
            steps=self.num_steps,
            computed_tokens=self.num_computed_tokens,
            retractions=self.batch_scheduler.num_retractions,
            bad_frames=self.transport.num_bad_frames,
            shared_kv_tokens=self.model_runner.num_saved_reads,
            **msgspec.structs.asdict(totals),
        )

    # -- failures ---------------------------------------------------------------------------------

    def _recover(self, error: Exception, *steps: OverlappedStep) -> None:
        """Isolates the requests of steps that raised `error`: each is computed again, alone in its batch.

        A request whose isolated step raises again fails; the others continue. The latest step is given first.
        """
        self.error_log.record(error)
        requests = discard_steps(steps, self.batch_scheduler)
        for request in reversed([request for request in requests if request in self.batch_scheduler.running]):
            if request not in self.batch_scheduler.isolated:
                self.batch_scheduler.isolate(request)
                continue
            text = f"the model could not compute this step ({type(error).__name__}: {error!s:.200})"
            self.committer.fail_request(request, "internal", text)
