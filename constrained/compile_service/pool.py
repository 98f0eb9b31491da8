"""Compiles constraints in worker processes that can be killed, for a caller with an event loop.

No method blocks: the caller polls `filenos()` until `next_deadline()`, then calls `collect()`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic

from plait.constrained.compile_service import failures
from plait.constrained.compile_service.answer_cache import AnswerCache
from plait.constrained.compile_service.grammar_builds import GrammarBuilds, grammar_of
from plait.constrained.compile_service.in_place import InPlaceCompiler
from plait.constrained.compile_service.pending_spec import PendingSpec, PendingSpecs, SpecQueues
from plait.constrained.compile_service.spec_cost import is_small
from plait.constrained.compile_service.worker_messages import CompileRefused, CompileResult, WorkerInit
from plait.constrained.compile_service.worker_set import JobFailure, WorkerSet
from plait.constrained.grammar import Grammar
from plait.constrained.reasoning_matcher import ReasoningGrammar
from plait.constrained.spec_file import RecentSpecs, SpecFile
from plait.constrained.specs import CompileQueueFull, GrammarError, Reasoning, Spec
from plait.constrained.tokens.vocabulary import Vocabulary

MEMORY_BYTES = 2 << 30
RETRY_S = 30.0  # how long the failure of a spec that was too slow or too large stays cached
JOB_SHARE = 0.9  # of the deadline: the CPU time that a job may use
LONG_BYTES = 512 << 10  # of a spec, which may take twice the time then
MAX_WALL_FACTOR = 10.0  # times the deadline: how long the callers of a job wait on a busy machine
EXTENSION_S = 0.02  # the least time after which a late job is looked at again
SMALL_LIMIT_S = 0.1  # CPU time of a small spec; one that takes longer counts as large
MAX_WAIT_S = 30.0  # time in the queue
_WRITE_RETRY_S = 0.001
_WARMUP_TENANT = "\0warmup"  # no name of a tenant


class CompilePool:
    """Worker processes that compile specs for one vocabulary, and a cache of at most `cache_bytes`. Not thread-safe.

    - Concurrency: at most `workers` jobs run at once; `spares` more workers wait to replace one that is killed. Tenants
      share the workers' time by their `tenant_weights` (1 by default). With two workers or more, one is reserved for
      small specs: those that `spec_cost` estimates to be small and that compile within 0.1 s of CPU time.
    - Priority: with two workers or more, the specs of a tenant that has used more than two seconds of CPU time lately
      are lowered beside the work of others (`watch_others`): compiled one at a time, in time that nothing else wants.
    - Time: a job that uses more than 0.9 of `deadline_s` of CPU time fails, and its worker is killed; a spec of 512 KiB
      or more may use twice that, shorter ones in proportion to their length. Waiting for a processor does not count, so
      a busy machine hardly changes which specs are taken. A job that has got less after ten times `deadline_s` of wall
      time fails with CompileQueueFull instead.
    - Queue: a spec that waits for 30 s fails with CompileQueueFull, and so does a spec of a tenant that has 1,024
      others, or 16 MiB of them, waiting.
    - Memory: a worker may use `memory_bytes` in addition to what it needs itself. It is replaced if it retains 128 MiB
      of them.

    Errors are cached like grammars. `compile_s` holds the CPU seconds of the last 1,000 jobs. Without `start_eagerly`
    the processes start with the first job, which then takes a second longer, or with `start_workers`. With `in_place`,
    `submit` itself compiles small specs (in_place.py), in a few milliseconds once the vocabulary is warmed up. With
    `spec_file`, the specs used last are written to it, and compiled again after a restart, one at a time while no
    other one is.

    >>> pool = CompilePool(vocabulary)                                    # doctest: +SKIP
    >>> pool.start()                                                      # doctest: +SKIP
    >>> ticket = pool.submit(Regex("[0-9]+"), tenant="a")                 # doctest: +SKIP
    >>> poll(pool.filenos(), until=pool.next_deadline())                  # doctest: +SKIP
    >>> pool.collect()                                                    # doctest: +SKIP
    [(1, <DfaGrammar>)]
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        workers: int = 1,
        spares: int = 0,
        deadline_s: float = 2.0,
        cache_bytes: int = 64 << 20,
        memory_bytes: int = MEMORY_BYTES,
        start_eagerly: bool = True,
        in_place: bool = False,
        spec_file: SpecFile | None = None,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        if workers < 1 or spares < 0 or deadline_s <= 0 or cache_bytes < 0 or memory_bytes < 1:
            raise ValueError("workers, deadline_s, memory_bytes must be positive, spares, cache_bytes not negative")
        self.vocabulary = vocabulary
        self.deadline_s, self._job_limit_s = deadline_s, JOB_SHARE * deadline_s
        self._wall_limit_s = MAX_WALL_FACTOR * deadline_s
        self.cache = AnswerCache(cache_bytes)
        self.compile_s: deque[float] = deque(maxlen=1000)
        init = WorkerInit([*vocabulary.token_bytes], [*vocabulary.eos_ids], memory_bytes, {**vocabulary.control_texts})
        self._in_place = InPlaceCompiler(vocabulary) if in_place else None
        self._workers = WorkerSet[PendingSpec](init, workers + spares)
        self._open = False
        self._last_start_succeeded = True  # False if the last process died before it was ready
        self._keeps_workers = start_eagerly  # whether workers run even if no job waits
        self.builds = GrammarBuilds[PendingSpec](vocabulary)  # also of what all grammars share, which may come first
        self._queue = SpecQueues(workers, tenant_weights)
        self._pending = PendingSpecs()
        self._waiting: dict[int, PendingSpec] = {}  # by ticket
        self._wait_limits: deque[tuple[float, int]] = deque()  # (monotonic seconds, ticket), in order of time
        self._answers: dict[int, Grammar | GrammarError] = {}
        self._reasoning: dict[int, Reasoning] = {}  # by ticket: the reasoning before the value that is compiled
        self._last_ticket = 0
        self._recent_specs = RecentSpecs(spec_file, self.cache.grammars.specs)
        self._warmup_tickets: set[int] = set()  # tickets that the pool submitted itself

    def start(self) -> None:
        """Starts the workers without waiting for them; without `start_eagerly` they start with the first job.

        A closed pool can be started again.
        """
        self._open = True
        self.builds.open()
        self._recent_specs.read()
        if self._keeps_workers:
            self.builds.warm_up()  # here, before a request waits for it
        self._dispatch()

    def start_workers(self) -> None:
        """Starts the processes. Does nothing if they are running. Raises RuntimeError if the pool is not started."""
        self._require_open()
        if not self._keeps_workers:
            self._keeps_workers = True
            self._dispatch()

    def watch_others(self, is_beside_others: Callable[[str], bool]) -> None:
        """Sets what tells whether tenants other than a given one have work that wants the processor."""
        self._queue.is_beside_others = is_beside_others

    def submit(self, spec: Spec, tenant: str = "") -> int:
        """Requests a grammar. Returns a ticket that `collect` answers once. Raises RuntimeError if not started."""
        self._require_open()
        self._last_ticket += 1
        ticket = self._last_ticket
        if isinstance(spec, Reasoning):
            self._reasoning[ticket] = spec
            spec = spec.then
        known = self.cache.get(spec) or self._compile_in_place(spec, tenant)
        if known is not None:
            self._answers[ticket] = known
            return ticket
        pending = self._pending.get(spec) or self._pending.add(
            spec, tenant, is_small=self._queue.num_workers > 1 and is_small(spec)
        )
        if pending is None:
            self._answers[ticket] = failures.queue_full(self._pending.num_specs_of(tenant))
            return ticket
        if not pending.tickets or pending in self._queue:
            self._queue.put(pending, tenant)
        pending.tickets[ticket] = tenant
        self._waiting[ticket] = pending
        self._wait_limits.append((monotonic() + MAX_WAIT_S, ticket))
        self._raise(pending)  # another tenant may have begun it, and this one need not wait so long
        self.start_workers()
        self.builds.begin_warm_up()
        self._dispatch()
        return ticket

    def cancel(self, ticket: int) -> None:
        """Drops a ticket: `collect` never returns it. A job without other tickets is killed."""
        self._answers.pop(ticket, None)
        self._reasoning.pop(ticket, None)
        pending = self._waiting.get(ticket)
        if pending is not None:
            self._drop_ticket(pending, ticket)
            self._dispatch()

    def filenos(self) -> list[int]:
        """Returns the file descriptors to poll for reading. Call it before each poll, since workers are replaced."""
        return self._workers.filenos() + self.builds.filenos()

    def next_deadline(self) -> float | None:
        """Returns the `time.monotonic()` by which to call `collect` even if nothing is readable; None: no limit."""
        if self._answers:
            return monotonic()
        while self._wait_limits and self._wait_limits[0][1] not in self._waiting:
            self._wait_limits.popleft()
        times = [self._workers.next_deadline(), *(pending.answer_by for pending in self.builds.running)]
        if self._wait_limits:
            times.append(self._wait_limits[0][0])
        if self._workers.has_unsent:
            times.append(monotonic() + _WRITE_RETRY_S)
        if self._may_restore():
            times.append(monotonic())
        return min((time for time in times if time is not None), default=None)

    def collect(self) -> list[tuple[int, Grammar | GrammarError]]:
        """Returns the finished tickets, each with its grammar or error. Never blocks."""
        for pending, outcome in self._workers.collect():
            self._finish_job(pending, outcome)
        for pending, answer, cpu_s in self.builds.collect():
            self._queue.charge(pending.owner, cpu_s, monotonic())
            self._cache_and_finish(pending, answer)
        self._fail_long_builds()
        self._fail_long_waits()
        self._restore_one()
        self._dispatch()
        answers, self._answers = self._answers, {}
        for ticket in self._warmup_tickets & answers.keys():
            self._warmup_tickets.remove(ticket)
            del answers[ticket]
        return [(ticket, self._with_reasoning(ticket, answer)) for ticket, answer in answers.items()]

    def _with_reasoning(self, ticket: int, answer: Grammar | GrammarError) -> Grammar | GrammarError:
        spec = self._reasoning.pop(ticket, None)
        if spec is None or isinstance(answer, GrammarError):
            return answer
        try:
            return ReasoningGrammar(spec, answer, self.vocabulary)
        except GrammarError as error:
            return error

    def close(self) -> None:
        """Ends the processes and fails all pending tickets; their answers can still be collected."""
        if self._open:
            self._recent_specs.write()
        self._open = False
        for pending in self._pending:
            self._queue.discard(pending)
            self._finish(pending, GrammarError("the compiler was closed"))
        self._wait_limits.clear()
        self._workers.close()
        self.builds.close()

    # -- after a restart --------------------------------------------------------------------------

    def _may_restore(self) -> bool:
        """Returns whether specs of the last start are left, and the workers run and have nothing else to do."""
        is_idle = self._open and self._keeps_workers and not self._pending and self._workers.num_idle > 0
        return self._recent_specs.needs_warmup and is_idle

    def _restore_one(self) -> None:
        if self._may_restore():
            self._warmup_tickets.add(self.submit(self._recent_specs.next_to_warm_up(), _WARMUP_TENANT))

    # -- the queue --------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if not self._open:
            raise RuntimeError("the pool is not started")

    def _compile_in_place(self, spec: Spec, tenant: str) -> Grammar | None:
        if self._in_place is None or self._queue.is_lowered(tenant, monotonic()):
            return None
        grammar, spent_s = self._in_place.compile(spec)
        self._queue.charge(tenant, spent_s, monotonic())
        if grammar is not None:
            self.cache.put(spec, grammar)
            self._recent_specs.write_soon()
        return grammar

    def _raise(self, pending: PendingSpec) -> bool:
        """Begins a lowered spec again as a usual one if a tenant waits for it that is not lowered."""
        if pending in self.builds.running or not self._queue.may_raise(pending, monotonic()):
            return False
        pending.is_lowered, pending.is_raised = False, True
        self._queue_again(pending)
        return True

    def _queue_again(self, pending: PendingSpec) -> None:
        """Ends the job of a spec and queues it for all its tickets, before the other specs of their tenants."""
        self._workers.end(pending)
        self._queue.discard(pending)
        until = monotonic() + MAX_WAIT_S
        for ticket, tenant in pending.tickets.items():
            self._queue.put(pending, tenant, first=True)
            self._wait_limits.append((until, ticket))

    def _drop_ticket(self, pending: PendingSpec, ticket: int) -> None:
        """Removes a ticket without an answer. With the last ticket, also removes the spec and kills its job."""
        del self._waiting[ticket]
        tenant = pending.tickets.pop(ticket)
        if not pending.tickets:
            self._queue.discard(pending)
            self._workers.end(pending)
            self._pending.remove(pending)
        elif tenant not in pending.tickets.values():
            self._queue.discard(pending, tenant)

    def _fail_long_waits(self) -> None:
        """Fails the tickets that have waited too long in the queue."""
        now = monotonic()
        while self._wait_limits and self._wait_limits[0][0] <= now:
            _, ticket = self._wait_limits.popleft()
            pending = self._waiting.get(ticket)
            if pending is not None and pending in self._queue:
                self._drop_ticket(pending, ticket)
                self._answers[ticket] = failures.waited_in_queue(MAX_WAIT_S)

    def _dispatch(self) -> None:
        """Starts missing workers and gives jobs to idle ones."""
        if self._open and self._keeps_workers and (self._last_start_succeeded or len(self._queue)):
            self._last_start_succeeded = True
            self._workers.maintain()
        self._queue.settle(self._workers.jobs, monotonic())
        self._queue.lower(monotonic())
        self._fail_starts()
        while self._workers.num_idle and (pending := self._queue.pop(self._workers.jobs, monotonic())) is not None:
            self._begin(pending)
        if self._workers.has_idle_for_lowered and not any(pending.is_lowered for pending in self.builds.running):
            lowered = self._queue.pop_lowered(monotonic())
            if lowered is not None:
                self._begin(lowered)

    def _begin(self, pending: PendingSpec) -> None:
        limit_s = min(SMALL_LIMIT_S, self._job_limit_s) if pending.is_small else self._limit_s(pending)
        pending.answer_by = monotonic() + self._wall_limit_s
        self._workers.begin(pending, pending.spec, limit_s, self._wall_limit_s)

    def _limit_s(self, pending: PendingSpec) -> float:
        """Returns the CPU time that a spec may use, in seconds."""
        return self._job_limit_s * (1 + min(1.0, pending.num_bytes / LONG_BYTES))

    def _fail_starts(self) -> None:
        """Fails a queued job for each failed start. Workers then start only while jobs wait, so that attempts end."""
        for _ in range(self._workers.take_failed_starts()):
            self._last_start_succeeded = False
            pending = self._queue.pop((), monotonic()) or self._queue.pop_lowered(monotonic())
            if pending is not None:
                self._finish(pending, CompileQueueFull("the compiler process did not start"))

    # -- results ----------------------------------------------------------------------------------

    def _finish_job(self, pending: PendingSpec, outcome: CompileResult | JobFailure) -> None:
        if outcome is JobFailure.LATE and pending.is_small and monotonic() < pending.answer_by:
            self._move_to_large_queue(pending)
        elif outcome is JobFailure.LATE:
            cpu_s, limit_s = self._workers.cpu_seconds(pending), self._limit_s(pending)
            if cpu_s < limit_s and monotonic() < pending.answer_by:
                if cpu_s > limit_s / 2 or not self._raise(pending):
                    self._continue_until(pending, limit_s, cpu_s)
                return
            self._workers.end(pending)
            if cpu_s < limit_s:
                self._finish(pending, failures.starved(cpu_s, self._wall_limit_s, is_lowered=pending.is_lowered))
            else:
                self._cache_and_finish(pending, failures.too_long(pending.spec, limit_s), RETRY_S)
        elif isinstance(outcome, JobFailure):
            self._cache_and_finish(pending, failures.died(), RETRY_S)
        else:
            self.compile_s.append(outcome.spent_s)
            self._take_result(pending, outcome)

    def _continue_until(self, pending: PendingSpec, limit_s: float, cpu_s: float) -> None:
        """Lets a job that has used `cpu_s` of CPU time go on for the rest of `limit_s`, at least by the clock."""
        self._workers.extend(pending, min(pending.answer_by, monotonic() + max(EXTENSION_S, limit_s - cpu_s)))

    def _fail_long_builds(self) -> None:
        """Fails the specs whose grammar is still being built in a thread at the deadline; it is cached once built."""
        now = monotonic()
        for pending in [pending for pending in self.builds.running if pending.answer_by <= now]:
            self.builds.running.discard(pending)
            self._finish(pending, failures.not_built(pending.spec, self._wall_limit_s))

    def _move_to_large_queue(self, pending: PendingSpec) -> None:
        """Makes a spec large that was estimated to be small and has used up the time of a small one.

        It continues if a large job may run; otherwise it is queued again, before the other specs of its tenants. A spec
        that has not had SMALL_LIMIT_S of CPU time yet stays small and continues.
        """
        cpu_s = self._workers.cpu_seconds(pending)
        if cpu_s < SMALL_LIMIT_S:
            self._continue_until(pending, SMALL_LIMIT_S, cpu_s)
            return
        may_continue = self._queue.may_run_large(self._workers.jobs) and not self._queue.has_large
        pending.is_small = False
        if may_continue:
            self._continue_until(pending, self._limit_s(pending), cpu_s)
            return
        self._queue_again(pending)

    def _take_result(self, pending: PendingSpec, result: CompileResult) -> None:
        answer = result.answer
        if isinstance(answer, CompileRefused):
            self._cache_and_finish(pending, GrammarError(answer.reason, answer.where))
        elif self.builds.is_quick(answer, result.spent_s):
            self._cache_and_finish(pending, grammar_of(answer, self.vocabulary))
        else:
            self.builds.begin(pending, answer, is_lowered=pending.is_lowered)

    def _cache_and_finish(
        self, pending: PendingSpec, answer: Grammar | GrammarError, valid_for_s: float = math.inf
    ) -> None:
        """Caches the answer and passes it to all tickets of the spec."""
        self.cache.put(pending.spec, answer, valid_for_s)
        self._finish(pending, answer)
        self._recent_specs.write_soon()

    def _finish(self, pending: PendingSpec, answer: Grammar | GrammarError) -> None:
        """Answers the tickets of a spec that is no longer queued; does nothing if all were cancelled."""
        if self._pending.get(pending.spec) is pending:
            self._pending.remove(pending)
            for ticket in pending.tickets:
                del self._waiting[ticket]
                self._answers[ticket] = answer
