"""Compiles constraints in worker processes that can be killed, for a caller with an event loop.

No method blocks: the caller polls `filenos()` until `next_deadline()`, then calls `collect()`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from threading import Thread
from time import monotonic

from plait.constrained.compile_service.background_calls import BackgroundCalls
from plait.constrained.compile_service.messages import (
    CompileJob,
    CompileRefused,
    CompileResult,
    FromWorker,
    TokenDfaArrays,
    WorkerInit,
    unpack_dfa,
)
from plait.constrained.compile_service.spec_cache import SpecCache
from plait.constrained.compile_service.worker_process import WALL_TIME_FACTOR, WorkerProcess
from plait.constrained.compiler import build_grammar
from plait.constrained.grammar import Grammar
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, warm_up
from plait.constrained.specs import GrammarError, Spec
from plait.constrained.vocabulary import Vocabulary

MEMORY_BYTES = 2 << 30
MAX_GROWTH_BYTES = 128 << 20  # a worker whose memory grew by more is replaced
REFUSALS_BYTES = 4 << 20
RETRY_S = 30.0  # a spec that was too slow or too large is refused for this long
BACKGROUND_BUILD_S = 0.005  # a grammar that took the worker longer is built in a thread, not in the caller's loop
_FOREVER = float("inf")
_WRITE_RETRY_S = 0.001
_REAP_TIMEOUT_S = 5.0


@dataclass(eq=False)
class _PendingSpec:
    """A spec that is not compiled yet, and the tickets that wait for it."""

    spec: Spec
    tickets: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Refusal:
    """Why a spec was refused, and until when the refusal is valid (monotonic seconds)."""

    reason: str
    where: int | str | None
    until: float


class CompilePool:
    """`workers` worker processes for one vocabulary, and a cache of at most `cache_bytes`. Not thread-safe.

    A job that uses more than `deadline_s` of CPU time, or four times that of wall time, fails with a GrammarError, and
    its worker is killed and replaced; starting a worker does not count and may take 20 s. A worker may use
    `memory_bytes` beyond what it needs itself, and is replaced when it keeps 128 MiB of them. Refusals are cached like
    grammars. `compile_s` holds the seconds of the last 1,000 jobs. Without `start_eagerly` workers start with the first
    job, which then takes half a second longer; this saves 80 MB where no constraint is used.

    >>> pool = CompilePool(vocabulary)                                    # doctest: +SKIP
    >>> pool.start()                                                      # doctest: +SKIP
    >>> ticket = pool.submit(Regex("[0-9]+"))                             # doctest: +SKIP
    >>> poll(pool.filenos(), until=pool.next_deadline())                  # doctest: +SKIP
    >>> pool.collect()                                                    # doctest: +SKIP
    [(1, <DfaGrammar>)]
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        workers: int = 1,
        deadline_s: float = 2.0,
        cache_bytes: int = 64 << 20,
        memory_bytes: int = MEMORY_BYTES,
        start_eagerly: bool = True,
    ) -> None:
        if workers < 1 or deadline_s <= 0 or cache_bytes < 0 or memory_bytes < 1:
            raise ValueError("workers, deadline_s and memory_bytes must be positive, cache_bytes not negative")
        self.vocabulary = vocabulary
        self.deadline_s = deadline_s
        self.cache = SpecCache[Grammar](cache_bytes)
        self.compile_s: deque[float] = deque(maxlen=1000)
        self._refusals = SpecCache[_Refusal](min(cache_bytes, REFUSALS_BYTES))
        self._worker_init = WorkerInit(list(vocabulary.token_bytes), list(vocabulary.eos_ids), memory_bytes)
        self._workers = workers
        self._open = False
        self._last_start_succeeded = True  # False after a worker that died before it was ready
        self._wants_children = start_eagerly  # whether workers run even if no job waits
        self._children: dict[WorkerProcess, _PendingSpec | None] = {}
        self._ended: list[WorkerProcess] = []  # killed, not yet reaped
        self._queue: deque[_PendingSpec] = deque()
        self._pending: dict[Spec, _PendingSpec] = {}
        self._background: BackgroundCalls[_PendingSpec, Grammar | GrammarError] | None = None  # set while open
        self._answers: list[tuple[int, Grammar | GrammarError]] = []
        self._last_ticket = 0

    def start(self) -> None:
        """Starts the workers without waiting for them; without `start_eagerly` they start with the first job.

        A closed pool can be started again.
        """
        self._open = True
        self._background = self._background or BackgroundCalls()
        if self._wants_children:
            self._warm_up()  # now, while no text waits for it
        self._dispatch()

    def submit(self, spec: Spec) -> int:
        """Requests a grammar. Returns a ticket that `collect` answers once. Raises RuntimeError if not started."""
        if not self._open:
            raise RuntimeError("the pool is not started")
        self._last_ticket += 1
        ticket = self._last_ticket
        known = self.cache.get(spec) or self._cached_refusal(spec)
        if known is not None:
            self._answers.append((ticket, known))
            return ticket
        pending = self._pending.get(spec)
        if pending is None:
            pending = self._pending[spec] = _PendingSpec(spec)
            self._queue.append(pending)
            if not self._wants_children:
                self._wants_children = True
                Thread(target=self._warm_up, daemon=True, name="plait-warm-up").start()  # while the child starts
        pending.tickets.add(ticket)
        self._dispatch()
        return ticket

    def cancel(self, ticket: int) -> None:
        """Drops a ticket: `collect` never returns it. A job without other tickets is not started."""
        self._answers = [answer for answer in self._answers if answer[0] != ticket]
        for pending in list(self._pending.values()):
            pending.tickets.discard(ticket)
            if not pending.tickets and pending in self._queue:
                self._queue.remove(pending)
                del self._pending[pending.spec]

    def filenos(self) -> list[int]:
        """Returns the descriptors to poll for reading. Ask before each poll, since workers are replaced."""
        return [child.fileno() for child in self._children] + ([self._background.fileno()] if self._background else [])

    def next_deadline(self) -> float | None:
        """Returns the `time.monotonic()` by which to call `collect` even if nothing is readable; None: no limit."""
        if self._answers:
            return monotonic()
        times = [child.deadline for child in self._children if child.deadline is not None]
        if any(child.has_unsent for child in self._children):
            times.append(monotonic() + _WRITE_RETRY_S)
        return min(times, default=None)

    def collect(self) -> list[tuple[int, Grammar | GrammarError]]:
        """Returns the finished tickets, each with its grammar or error. Never blocks."""
        for child in list(self._children):
            child.flush()
            for message in child.receive():
                self._receive(child, message)
            if child not in self._children:
                continue  # replaced because it kept too much memory
            if child.is_dead:
                self._fail_job(child, "the compiler process died; the constraint may need too much memory")
            elif child.is_past_deadline():
                self._fail_job(child, f"took longer than {self.deadline_s:g} s to compile")
        for pending, answer in self._background.collect() if self._background else ():
            self._cache_and_finish(pending, answer)
        self._ended = [child for child in self._ended if not child.has_exited()]
        self._dispatch()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Ends the workers and fails all pending tickets; their answers can still be collected."""
        self._open = False
        for child in list(self._children):
            self._discard_child(child, "the compiler was closed")
        while self._queue:
            self._finish(self._queue.popleft(), GrammarError("the compiler was closed"))
        for pending in list(self._pending.values()):
            self._finish(pending, GrammarError("the compiler was closed"))
        if self._background is not None:
            self._background.close()
            self._background = None
        for child in self._ended:
            child.has_exited(wait_s=_REAP_TIMEOUT_S)
        self._ended.clear()

    def _dispatch(self) -> None:
        """Replaces workers that have ended and gives jobs to idle ones."""
        while self._wants_child():
            try:
                self._children[WorkerProcess(self._worker_init)] = None
                self._last_start_succeeded = True
            except OSError:
                self._fail_to_start()
        for child, pending in self._children.items():
            if child.is_ready and pending is None and self._queue:
                started = self._queue.popleft()
                self._children[child] = started
                child.begin(self.deadline_s)
                child.send(CompileJob(started.spec, WALL_TIME_FACTOR * self.deadline_s + 1.0))

    def _wants_child(self) -> bool:
        if not self._open or not self._wants_children or len(self._children) >= self._workers:
            return False
        return self._last_start_succeeded or bool(self._queue)

    def _warm_up(self) -> None:
        """Builds what the first grammar would otherwise wait for."""
        self.vocabulary.warm_up()
        warm_up(self.vocabulary)

    def _receive(self, child: WorkerProcess, message: FromWorker) -> None:
        pending = self._children[child]
        child.deadline = None
        if not isinstance(message, CompileResult) or pending is None:
            child.is_ready = True
            child.ready_bytes = child.resident_bytes()
            return
        self._children[child] = None
        self.compile_s.append(message.spent_s)
        answer = message.answer
        if isinstance(answer, CompileRefused):
            self._cache_and_finish(pending, GrammarError(answer.reason, answer.where))
        elif (
            isinstance(answer, LlguidanceSource)
            and message.spent_s > BACKGROUND_BUILD_S
            and self._background is not None
        ):
            self._background.begin(pending, lambda: _grammar(answer, self.vocabulary))
        else:
            self._cache_and_finish(pending, _grammar(answer, self.vocabulary))
        if child.resident_bytes() > child.ready_bytes + MAX_GROWTH_BYTES:
            self._discard_child(child, "")

    def _cached_refusal(self, spec: Spec) -> GrammarError | None:
        known = self._refusals.get(spec)
        if known is not None and known.until < monotonic():
            self._refusals.drop(spec)
            known = None
        return None if known is None else GrammarError(known.reason, known.where)

    def _cache_and_finish(
        self, pending: _PendingSpec, answer: Grammar | GrammarError, valid_for_s: float = _FOREVER
    ) -> None:
        """Caches the answer and passes it to all tickets of the spec."""
        if isinstance(answer, GrammarError):
            refusal = _Refusal(answer.reason, answer.where, monotonic() + valid_for_s)
            self._refusals.put(pending.spec, refusal, 500 + len(answer.reason))
        else:
            self.cache.put(pending.spec, answer, answer.nbytes)
        self._finish(pending, answer)

    def _fail_job(self, child: WorkerProcess, reason: str) -> None:
        """Ends a worker because of its job, which fails with `reason`."""
        pending = self._children[child]
        if pending is not None:
            self._children[child] = None
            self._cache_and_finish(pending, GrammarError(reason), RETRY_S)
        self._discard_child(child, reason)

    def _discard_child(self, child: WorkerProcess, reason: str) -> None:
        """Ends a worker; its job, if any, fails with `reason`."""
        pending = self._children.pop(child)
        child.kill()
        self._ended.append(child)
        if not child.is_ready:
            self._fail_to_start()
        if pending is not None:
            self._finish(pending, GrammarError(reason))

    def _fail_to_start(self) -> None:
        """Fails one job for each failed start. No worker starts without a job, so failed starts come to an end."""
        self._last_start_succeeded = False
        if self._queue and self._open:
            self._finish(self._queue.popleft(), GrammarError("the compiler process did not start"))

    def _finish(self, pending: _PendingSpec, answer: Grammar | GrammarError) -> None:
        if self._pending.get(pending.spec) is pending:
            del self._pending[pending.spec]
            self._answers += [(ticket, answer) for ticket in sorted(pending.tickets)]


def _grammar(form: TokenDfaArrays | LlguidanceSource, vocabulary: Vocabulary) -> Grammar | GrammarError:
    try:
        return build_grammar(form if isinstance(form, LlguidanceSource) else unpack_dfa(form), vocabulary)
    except GrammarError as error:
        return error
