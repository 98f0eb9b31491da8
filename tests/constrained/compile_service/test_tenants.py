"""The pool under several tenants: turns, queues, bounds, cancellation, and exactly one answer for every ticket.

Most tests replace the worker processes by a list, so that they decide when a job ends.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import count
from time import monotonic, sleep
from typing import Any

import llguidance
import psutil
import pytest
from compile_pools import PATIENCE_S, results_of
from example_share import share_of

from plait.constrained import (
    Choices,
    CompilePool,
    CompileQueueFull,
    Grammar,
    GrammarError,
    JsonSchema,
    Regex,
    Vocabulary,
)
from plait.constrained.compile_service import grammar_builds, pending_spec
from plait.constrained.compile_service import pool as pool_module
from plait.constrained.compile_service.pending_spec import PendingSpec
from plait.constrained.compile_service.worker_messages import CompileRefused, CompileResult, WorkerInit
from plait.constrained.compile_service.worker_process import WorkerProcess
from plait.constrained.compile_service.worker_set import JobFailure, WorkerSet
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource


class ListedWorkers:
    """The interface of a WorkerSet. `running` are the jobs that run; the test puts the ended ones into `ended`."""

    def __init__(self, size: int) -> None:
        self.size, self.running = size, list[PendingSpec]()
        self.stopped: dict[PendingSpec, PendingSpec] = {}  # and the job that took its place
        self.ended: list[tuple[PendingSpec, CompileResult | JobFailure]] = []
        self.order: list[tuple[bool, set[str]]] = []  # of jobs that were begun, not lowered: whether small, its tenants
        self.late: list[PendingSpec] = []
        self.killed: list[PendingSpec] = []
        self.failed_starts = 0
        self.has_unsent = False
        self.used_cpu_s = 2.0  # by any job: all that it may

    @property
    def jobs(self) -> list[PendingSpec]:
        return [job for job in self.running if not job.gives_way and not job.is_stopped]

    @property
    def num_idle(self) -> int:
        return self.size - sum(not job.is_lowered for job in self.running)

    @property
    def has_idle_for_lowered(self) -> bool:
        return not any(job.is_lowered for job in self.running)

    def begin(self, job: PendingSpec, spec: object, limit_s: float, max_limit_s: float) -> None:
        assert job not in self.running
        assert job.tickets, "nobody waits for it"
        for other in [other for other in self.running if other.gives_way and not other.is_stopped]:
            other.is_stopped, self.stopped[other] = True, job
        self.running.append(job)
        if not job.is_lowered:
            self.order.append((job.is_small, set(job.tickets.values())))

    def extend(self, job: PendingSpec, until: float) -> None:
        assert job in self.running

    def cpu_seconds(self, job: PendingSpec) -> float:
        return self.used_cpu_s

    def end(self, job: PendingSpec) -> None:
        if job in self.running:
            self.running.remove(job)
            self.killed.append(job)

    def refuse(self, job: PendingSpec) -> None:
        """Ends a job as a worker does that does not support its spec."""
        self.running.remove(job)
        self.ended.append((job, CompileResult(CompileRefused("no", None), 0.001)))

    def compile(self, job: PendingSpec, source: LlguidanceSource) -> None:
        """Ends a job as a worker does that has compiled its spec."""
        self.running.remove(job)
        self.ended.append((job, CompileResult(source, 1.0)))

    def fail(self, job: PendingSpec) -> None:
        """Ends a job as the death of its worker does."""
        self.running.remove(job)
        self.ended.append((job, JobFailure.DIED))

    def collect(self) -> list[tuple[PendingSpec, CompileResult | JobFailure]]:
        late, self.late = [job for job in self.late if job in self.running], []
        ended, self.ended = [*self.ended, *((job, JobFailure.LATE) for job in late)], []
        return ended

    def maintain(self) -> None:
        for job in [job for job, other in self.stopped.items() if job not in self.running or other not in self.running]:
            del self.stopped[job]
            job.gives_way = job.is_stopped = False

    def take_failed_starts(self) -> int:
        failed, self.failed_starts = self.failed_starts, 0
        return failed

    def next_deadline(self) -> float | None:
        return None

    def filenos(self) -> list[int]:
        return []

    def close(self) -> None:
        self.running.clear()


def make_pool(
    vocabulary: Vocabulary, workers: int = 2, cache_bytes: int = 1 << 20
) -> tuple[CompilePool, ListedWorkers]:
    pool = CompilePool(vocabulary, workers=workers, spares=1, cache_bytes=cache_bytes, start_eagerly=False)
    listed = ListedWorkers(workers + 1)
    pool._workers = listed  # type: ignore[assignment]
    pool.builds.warm_up_pieces.clear()
    pool.start()
    return pool, listed


def large(number: int) -> JsonSchema:
    return JsonSchema({"enum": [f"member {number} {i}" for i in range(2000)]})


def test_tenants_share_the_workers_by_time(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(pool_module, "monotonic", lambda: clock)
    pool, workers = make_pool(small)
    first = [pool.submit(large(n), "a") for n in range(5)]
    second = [pool.submit(large(10 + n), "b") for n in range(2)]
    order = list[str]()
    while len(workers.running):
        (job,) = workers.running
        order.append(job.owner)
        clock += 1.0 if job.owner == "a" else 0.4
        workers.refuse(job)
        answered = dict(pool.collect())
        assert answered.keys() < {*first, *second}
    assert "".join(order) == "abbaaaa", "two short jobs of b take less time than one of a"
    pool.close()


def test_an_expensive_spec_is_stopped_while_one_of_another_tenant_compiles(
    small: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(pool_module, "monotonic", lambda: clock)
    pool, workers = make_pool(small)
    for n in range(3):
        pool.submit(large(n), "a")
    (expensive,) = workers.running
    clock += 1.0
    pool.collect()
    assert not expensive.gives_way, "only specs of its own tenant wait"
    ticket = pool.submit(large(9), "b")
    assert workers.running[1].owner == "b"
    assert (expensive.is_stopped, workers.jobs) == (True, workers.running[1:])
    clock += 0.01
    assert pool.collect() == []
    assert len(workers.running) == 2, "the place of the stopped one is not free"
    workers.refuse(workers.running[1])
    assert [answered for answered, _ in pool.collect()] == [ticket]
    assert workers.jobs == [expensive]
    workers.refuse(expensive)
    pool.collect()
    assert [job.owner for job in workers.running] == ["a"]
    pool.close()


def test_a_spec_does_not_give_way_to_one_of_a_tenant_that_was_served_as_much(
    small: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(pool_module, "monotonic", lambda: clock)
    pool, workers = make_pool(small)
    pool.submit(large(0), "a")
    clock += 0.04
    pool.submit(large(1), "b")
    assert [job.owner for job in workers.running] == ["a"]
    pool.close()


def use_much(pool: CompilePool, workers: ListedWorkers, tenant: str) -> None:
    """Lets a tenant compile a spec that takes as much CPU time as one without consequences may."""
    pool.submit(large(next(_numbers)), tenant)
    workers.running[-1].cpu_s = pending_spec.USED_S + 0.5
    workers.refuse(workers.running[-1])
    pool.collect()


_numbers = count(1_000_000)


def test_specs_of_a_tenant_that_used_much_are_lowered_beside_others(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: tenant != "only one with work")
    use_much(pool, workers, "a")
    for n in range(3):
        pool.submit(large(n), "a")
    pool.submit(Regex("a{3}"), "a")
    (lowered,) = workers.running
    assert lowered.is_lowered, "one at a time, also if small"
    honest = pool.submit(large(8), "b")
    assert [(job.owner, job.is_lowered) for job in workers.running] == [("a", True), ("b", False)]
    assert not lowered.gives_way and not lowered.is_stopped, "it takes no time from others"
    workers.refuse(workers.running[1])
    assert [ticket for ticket, _ in pool.collect()] == [honest]
    use_much(pool, workers, "only one with work")
    pool.submit(large(9), "only one with work")
    assert [(job.owner, job.is_lowered) for job in workers.running] == [("a", True), ("only one with work", False)]
    for job in list(workers.running):
        workers.refuse(job)
    pool.collect()
    assert [(job.owner, job.is_lowered) for job in workers.running] == [("a", True)]
    pool.close()


def test_specs_that_wait_already_are_lowered_too(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    for n in range(3):
        pool.submit(large(n), "a")
    pool.submit(large(2), "b")
    workers.running[0].cpu_s = 2.5
    workers.refuse(workers.running[0])
    pool.collect()
    assert [(job.spec, job.is_lowered) for job in workers.running] == [(large(2), False), (large(1), True)]
    pool.close()


def test_a_tenant_is_no_longer_lowered_after_a_while(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(pool_module, "monotonic", lambda: clock)
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    use_much(pool, workers, "a")
    clock += 5.0
    pool.submit(large(0), "a")
    assert workers.running[0].is_lowered
    workers.refuse(workers.running[0])
    clock += 5.0
    pool.collect()
    pool.submit(large(1), "a")
    assert not workers.running[0].is_lowered
    pool.close()


def test_a_job_that_is_cancelled_counts_as_used(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    ticket = pool.submit(large(0), "a")
    workers.running[0].cpu_s = 2.5
    pool.cancel(ticket)
    pool.submit(large(1), "a")
    assert workers.running[0].is_lowered
    pool.close()


def test_a_lowered_job_begins_again_for_a_tenant_that_is_not(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    use_much(pool, workers, "a")
    tickets = {pool.submit(large(0), "a")}
    (job,) = workers.running
    tickets.add(pool.submit(large(0), "b"))
    assert (workers.killed, workers.running, job.is_lowered) == ([job], [job], False)
    workers.refuse(job)
    assert {ticket for ticket, _ in pool.collect()} == tickets
    pool.close()


def test_a_lowered_job_that_another_tenant_began_again_is_answered_without_that_tenant(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    use_much(pool, workers, "a")
    ticket = pool.submit(large(0), "a")
    (job,) = workers.running
    pool.submit(large(1), "c")
    other = pool.submit(large(0), "b")
    assert workers.killed == [job], "the place of large specs is taken"
    assert job not in workers.running
    pool.cancel(other)
    workers.refuse(workers.running[0])
    pool.collect()
    assert workers.running == [job]
    workers.refuse(job)
    assert [number for number, _ in pool.collect()] == [ticket]
    pool.close()


def test_a_lowered_tenant_lowers_no_spec_that_another_one_waits_for(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    use_much(pool, workers, "a")
    pool.submit(large(1), "c")
    pool.submit(large(0), "b")
    pool.submit(large(0), "a")
    assert [job.owner for job in workers.running] == ["c"]
    workers.refuse(workers.running[0])
    pool.collect()
    assert [(job.owner, job.is_lowered) for job in workers.running] == [("b", False)]
    pool.close()


@pytest.mark.parametrize("is_running", [True, False])
def test_a_lowered_spec_is_raised_once_its_tenant_is_no_longer_lowered(
    small: Vocabulary, is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(pool_module, "monotonic", lambda: clock)
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    use_much(pool, workers, "a")
    tickets = [pool.submit(large(n), "a") for n in range(2)]
    (job,) = workers.running
    assert job.is_lowered
    workers.used_cpu_s = 0.02  # the others leave it hardly any
    clock += 5.0
    workers.late += [job] * is_running
    assert pool.collect() == []
    assert workers.running == [job], "still lowered"
    clock += 5.0
    workers.late += [job] * is_running
    assert pool.collect() == []
    assert [(other is job, other.is_lowered) for other in workers.running][-1] == (is_running, False)
    for number in (0, 1):
        workers.used_cpu_s = 2.0
        workers.refuse(workers.running[-1])
        assert len(pool.collect()) == 1, number
    assert tickets
    pool.close()


def test_a_lowered_job_that_gets_processor_time_is_not_begun_again(
    small: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(pool_module, "monotonic", lambda: clock)
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    use_much(pool, workers, "a")
    pool.submit(large(0), "a")
    workers.used_cpu_s = 1.5
    clock += 10.0
    workers.late += workers.running
    assert pool.collect() == []
    assert workers.running[0].is_lowered
    assert not workers.killed
    pool.close()


def test_the_grammar_of_a_lowered_spec_is_built_at_a_lower_priority(
    small: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    niceness = list[int]()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    built = grammar_builds.grammar_of

    def grammar_of(*arguments: Any) -> Grammar | GrammarError:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - own)
        return built(*arguments)

    monkeypatch.setattr(grammar_builds, "grammar_of", grammar_of)
    use_much(pool, workers, "a")
    for tenant in ("a", "b"):
        ticket = pool.submit(large(next(_numbers)), tenant)
        workers.compile(workers.running[-1], LlguidanceSource(llguidance.LLMatcher.grammar_from_regex("[a-z]+")))
        assert isinstance(results_of(pool, [ticket])[ticket], Grammar)
    highest = 19 - own
    expected = (grammar_builds.LOWERED_NICENESS, grammar_builds.NICENESS) if sys.platform == "linux" else (0, 0)
    assert niceness == [min(n, highest) for n in expected]
    pool.close()


def test_what_a_starved_lowered_spec_is_told(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.watch_others(lambda tenant: True)
    use_much(pool, workers, "a")
    pool.submit(large(0), "a")
    workers.used_cpu_s = 0.02
    workers.running[0].answer_by = monotonic()
    workers.late.append(workers.running[0])
    ((_, error),) = pool.collect()
    assert isinstance(error, CompileQueueFull)
    assert str(error) == (
        "the machine is too busy: the compiler got 0.02 s of processor time in 20 s, since the constraints of this "
        "tenant took much of it lately; try again later"
    )
    pool.close()


def test_small_specs_do_not_wait_for_large_ones(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    for n in range(20):
        pool.submit(large(n), "a")
    assert len(workers.running) == 1, "one worker is kept for small specs"
    tiny = pool.submit(JsonSchema({"type": "integer"}), "b")
    assert [job.owner for job in workers.running] == ["a", "b"]
    workers.refuse(workers.running[1])
    assert [ticket for ticket, _ in pool.collect()] == [tiny]
    pool.close()


def test_a_spec_that_is_not_as_small_as_estimated_moves_to_the_large_lane(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.submit(large(0), "a")
    ticket = pool.submit(Regex("a{3}"), "b")
    job = workers.running[1]
    workers.late.append(job)
    assert pool.collect() == []
    assert workers.killed == [job], "another large one runs, so it has to wait"
    workers.refuse(workers.running[0])
    pool.collect()
    assert workers.running == [job]
    workers.late.append(job)
    ((answered, error),) = pool.collect()
    assert answered == ticket
    assert str(error) == "the pattern took too long: more than 1.8 s of processor time to compile"
    pool.close()


def test_a_spec_that_is_begun_again_holds_one_worker(small: Vocabulary) -> None:
    """It moves to the large queue, where a failed start takes it before the end of its first job is seen."""
    pool, workers = make_pool(small)
    pool.submit(large(1), "a")
    pool.submit(JsonSchema({"type": "integer"}), "b")
    workers.late.append(workers.running[1])
    workers.failed_starts = 1
    assert [type(answer) for _, answer in pool.collect()] == [CompileQueueFull]
    pool._queue.settle([], 0.0)
    assert not pool._queue._shares.holders()
    pool.close()


def test_a_small_spec_that_is_kept_from_the_processor_stays_small(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.submit(large(0), "a")
    ticket = pool.submit(Regex("a{3}"), "b")
    job = workers.running[1]
    workers.used_cpu_s = 0.02
    workers.late.append(job)
    assert pool.collect() == []
    assert job in workers.running
    assert job.is_small
    job.answer_by = monotonic()
    workers.late.append(job)
    ((answered, error),) = pool.collect()
    assert answered == ticket
    assert isinstance(error, CompileQueueFull), "but for no longer than any other"
    assert "the compiler got 0.02 s of processor time in 20 s; try again later" in str(error)
    pool.close()


def test_a_job_goes_on_until_it_has_used_its_processor_time(small: Vocabulary) -> None:
    """However much time has passed by the clock, so that a busy machine takes the same specs."""
    pool, workers = make_pool(small)
    ticket = pool.submit(large(0), "a")
    (job,) = workers.running
    limit_s = pool._limit_s(job)  # 1.8 s and a little, since the spec is long
    assert 1.8 < limit_s < 2.2
    workers.used_cpu_s = limit_s - 0.1
    for _ in range(3):
        workers.late.append(job)
        assert pool.collect() == []
        assert workers.running == [job]
    workers.used_cpu_s = limit_s + 0.1
    workers.late.append(job)
    ((answered, error),) = pool.collect()
    assert answered == ticket
    assert not isinstance(error, CompileQueueFull)
    assert f"{limit_s:.2g} s of processor time" in str(error)
    pool.close()


@pytest.mark.parametrize("beyond_s", [-0.01, 0.01])
def test_a_spec_is_refused_as_too_slow_only_if_its_compiler_could_run(small: Vocabulary, beyond_s: float) -> None:
    pool, workers = make_pool(small)
    is_starved = beyond_s < 0
    for _ in range(2):
        ticket = pool.submit(large(0), "a")
        if workers.running:
            workers.used_cpu_s = pool._limit_s(workers.running[0]) + beyond_s
            workers.running[0].answer_by = monotonic()
            workers.late.append(workers.running[0])
        ((answered, error),) = pool.collect()
        assert answered == ticket
        assert isinstance(error, CompileQueueFull) is is_starved
    assert len(workers.order) == (2 if is_starved else 1), "only what is known to be slow is remembered"
    pool.close()


def test_a_late_small_spec_goes_on_if_no_large_one_runs(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    ticket = pool.submit(Regex("a{3}"), "b")
    (job,) = workers.running
    workers.late.append(job)
    assert pool.collect() == []
    assert (workers.killed, workers.running) == ([], [job])
    pool.submit(large(0), "a")
    assert workers.running == [job], "it counts as a large one now"
    workers.refuse(job)
    assert [answered for answered, _ in pool.collect()] == [ticket]
    pool.close()


def test_a_compile_that_nobody_waits_for_is_ended(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    first, second = pool.submit(large(0), "a"), pool.submit(large(0), "b")
    queued = pool.submit(large(1), "a")
    (job,) = workers.running
    pool.cancel(first)
    assert workers.running == [job], "the other tenant waits for the same spec"
    pool.cancel(second)
    assert workers.killed == [job]
    assert [running.tickets for running in workers.running] == [{queued: "a"}], "the next one starts at once"
    pool.cancel(queued)
    assert workers.running == []
    assert pool.collect() == []
    assert pool.next_deadline() is None
    assert not pool._pending
    assert not pool._pending._num_specs
    pool.close()


def test_a_spec_of_two_tenants_has_the_turn_of_either(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.submit(large(0), "a")
    for n in (1, 2, 3):
        pool.submit(large(n), "a")
    pool.submit(large(3), "b")
    workers.refuse(workers.running[0])
    pool.collect()  # b's turn, since a has had a worker
    assert workers.running[0].spec == large(3)
    pool.close()


def test_the_queue_of_a_tenant_is_bounded(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_spec, "MAX_SPECS_OF_TENANT", 3)
    monkeypatch.setattr(pending_spec, "MAX_BYTES_OF_TENANT", 1000)
    pool, workers = make_pool(small)
    accepted = [pool.submit(Regex(f"a{{{n}}}"), "a") for n in (1, 2, 3)]
    refused = pool.submit(Regex("b"), "a")
    too_many_bytes = pool.submit(Regex("c" * 2000), "b")
    joined = pool.submit(Regex("a{3}"), "a")
    answers = dict(pool.collect())
    assert answers.keys() == {refused, too_many_bytes}
    assert all(isinstance(answer, CompileQueueFull) for answer in answers.values())
    assert str(answers[refused]).startswith("the queue of grammars is full: 3 of this tenant are in it")
    other = pool.submit(Regex("b"), "b")
    while workers.running:
        workers.refuse(workers.running[0])
        answers |= pool.collect()
    assert answers.keys() == {*accepted, refused, too_many_bytes, joined, other}
    again = pool.submit(Regex("d"), "a")
    workers.refuse(workers.running[0])
    assert not isinstance(dict(pool.collect())[again], CompileQueueFull), "there is room again, and nothing is cached"
    pool.close()


def test_a_failed_start_does_not_blame_the_constraint(small: Vocabulary) -> None:
    pool, workers = make_pool(small)
    pool.submit(large(0), "a")
    waiting = pool.submit(large(1), "a")
    workers.failed_starts = 1
    ((ticket, error),) = pool.collect()
    assert ticket == waiting and isinstance(error, CompileQueueFull)
    assert str(error) == "the compiler process did not start"
    again = pool.submit(large(1), "a")
    assert again not in dict(pool.collect()), "nothing is cached"
    pool.close()


def test_a_wait_in_the_queue_ends(small: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    now = monotonic()
    monkeypatch.setattr(pool_module, "monotonic", lambda: now)
    pool, workers = make_pool(small)
    workers.size = 1  # none is idle, which could take the place of the first spec
    pool.submit(large(0), "a")
    early = pool.submit(large(1), "a")
    now += 20.0
    late = pool.submit(large(1), "b")
    assert pool.next_deadline() == now + 10.0
    now += 10.0
    ((ticket, error),) = pool.collect()
    assert ticket == early
    assert isinstance(error, CompileQueueFull)
    assert str(error) == "the queue of grammars is full: this one waited for 30 s; try again later"
    workers.refuse(workers.running[0])
    pool.collect()
    workers.refuse(workers.running[0])
    assert [answered for answered, _ in pool.collect()] == [late], "who came later still waits for the same spec"
    pool.close()


@pytest.mark.parametrize("seed", range(share_of(150)))
def test_every_ticket_is_answered_once_whatever_happens(
    small: Vocabulary, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random submissions, cancellations, endings and deaths; the reference is the set of open tickets. Jobs take no
    time, so tenants without a worker take turns. In half of the runs some use up their processor time."""
    monkeypatch.setattr(pool_module, "monotonic", lambda: 0.0)
    rng = random.Random(seed)
    pool, workers = make_pool(small, workers=rng.choice((1, 2, 3)), cache_bytes=rng.choice((0, 1 << 20)))
    open_tickets, num_tenants, numbers = set[int](), rng.randint(1, 4), count()
    most_cpu_s = rng.choice((0.0, 2.0))
    pool.watch_others(lambda tenant: rng.random() < 0.7)
    wait: dict[str, int] = {}  # by tenant with a queued large spec: turns that others had meanwhile
    for _ in range(120):
        action, seen = rng.random(), len(workers.order)
        if action < 0.4:
            number = rng.choice((next(numbers), rng.randint(0, 5)))
            spec = large(number) if rng.random() < 0.5 else Regex(f"a{{{number}}}")
            open_tickets.add(pool.submit(spec, f"tenant {rng.randrange(num_tenants)}"))
        elif action < 0.55 and open_tickets:
            ticket = rng.choice(sorted(open_tickets))
            open_tickets.remove(ticket)
            pool.cancel(ticket)
        elif action < 0.9 and workers.running:
            job = rng.choice(workers.running)
            job.cpu_s = rng.uniform(0.0, most_cpu_s)
            end = rng.choice((workers.refuse, workers.refuse, workers.fail))
            end(job) if rng.random() < 0.8 else workers.late.append(job)
        elif action >= 0.97:
            workers.failed_starts += 1
            for ticket, _ in pool.collect():
                open_tickets.remove(ticket)
        if rng.random() < 0.7:
            for ticket, _ in pool.collect():
                open_tickets.remove(ticket)  # KeyError: answered twice, or after it was cancelled
        usual = [job for job in workers.running if not job.is_lowered]
        assert sum(not job.is_small for job in usual) <= max(1, pool._queue.num_workers - 1)
        assert len(usual) <= pool._queue.num_workers
        assert len(workers.running) - len(usual) <= (pool._queue.num_workers > 1)
        for was_small, tenants in workers.order[seen:]:
            wait = {name: 0 if name in tenants else turns + (not was_small) for name, turns in wait.items()}
        if action >= 0.9:
            wait = {}  # a failed start answers the next spec in the queue, which is a turn too
        pool._queue.settle(pool._workers.jobs, 0.0)
        has_none = [name for name in pool._queue._large._waiting if not pool._queue._shares.held(name)]
        wait = {name: wait.get(name, 0) for name in has_none}
        assert all(turns < num_tenants for turns in wait.values())
    pool.close()
    for ticket, answer in pool.collect():
        open_tickets.remove(ticket)
        assert isinstance(answer, GrammarError)
    assert not open_tickets
    assert not pool._pending
    assert not pool._waiting
    pool._queue.settle([], 0.0)
    assert not pool._queue._shares.holders(), "a tenant holds a worker for ever"


def test_a_lowered_job_stops_no_other_one(small: Vocabulary) -> None:
    class Worker:
        is_ready = True

        def __init__(self, is_lowered: bool) -> None:
            self.is_lowered, self.signals = is_lowered, list[int]()

        def begin(self, *job: object) -> None: ...

        def send_signal(self, number: int) -> None:
            self.signals.append(number)

    busy, lowered, fresh = Worker(False), Worker(True), Worker(False)
    workers = WorkerSet[PendingSpec](WorkerInit([], [], 0), 2)
    jobs = [PendingSpec(large(n), "a", 0, False, gives_way=n == 0, is_lowered=n == 1) for n in range(3)]
    workers._jobs = {busy: jobs[0], lowered: None, fresh: None}  # type: ignore[dict-item]
    workers.begin(jobs[1], jobs[1].spec, 1.0, 1.0)
    assert not busy.signals
    assert not jobs[0].is_stopped
    workers.begin(jobs[2], jobs[2].spec, 1.0, 1.0)
    assert busy.signals == [signal.SIGSTOP]


# -- with real processes ---------------------------------------------------------------------------


@pytest.fixture
def real(small: Vocabulary) -> Iterator[CompilePool]:
    pool = CompilePool(small, workers=2, spares=1, deadline_s=PATIENCE_S)
    pool.start()
    yield pool
    pool.close()


def test_no_process_is_left_after_deaths_and_cancellations(small: Vocabulary) -> None:
    others = psutil.Process().children(recursive=True)  # of other tests in this process
    real = CompilePool(small, workers=2, spares=1, deadline_s=1.0)
    real.start()
    rng, cancelled = random.Random(7), set[int]()
    tickets = {real.submit(Regex("a"), "a")}
    results_of(real, tickets)
    processes = list[psutil.Process]()
    for number in range(12):
        spec = rng.choice((large(number), Regex(f"[ab]{{{number + 1}}}"), Choices((f"a{number}",))))
        ticket = real.submit(spec, rng.choice("abc"))
        if rng.random() < 0.3:
            real.cancel(ticket)
            cancelled.add(ticket)
        else:
            tickets.add(ticket)
        workers = [child for child in real._workers if child.pid]
        if workers and rng.random() < 0.4:
            os.kill(rng.choice(workers).pid, signal.SIGKILL)
        processes += [p for p in psutil.Process().children(recursive=True) if p not in (*processes, *others)]
    answers = results_of(real, tickets - {min(tickets)})
    assert not answers.keys() & cancelled
    real.close()
    assert len(processes) >= 4
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


def test_the_spare_replaces_a_killed_worker(real: CompilePool) -> None:
    results_of(real, {real.submit(Regex("a"), "a")})
    give_up = monotonic() + PATIENCE_S
    while sum(child.is_ready for child in real._workers) < 3:
        assert monotonic() < give_up
        real.collect()
        sleep(0.005)
    before = [child.pid for child in real._workers]
    bomb = real.submit(JsonSchema({"oneOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in (24, 25)]}), "a")
    (running,) = [child.pid for child, job in real._workers._jobs.items() if job is not None]
    real.cancel(bomb)
    after = [child.pid for child in real._workers if child.is_ready]
    assert sorted([*after, running]) == sorted(before), "two that were forked ahead are ready"
    assert not isinstance(results_of(real, {ticket := real.submit(Regex("b"), "b")})[ticket], GrammarError)


def test_a_worker_stops_for_another_tenant_and_goes_on(real: CompilePool) -> None:
    bomb = JsonSchema({"oneOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in (24, 25, 26)]})
    expensive, give_up = real.submit(bomb, "a"), monotonic() + PATIENCE_S
    running = list[WorkerProcess]()
    while not running or running[0].job_cpu_seconds() < 0.1 or real._workers.num_idle < 2:
        running = [worker for worker, job in real._workers._jobs.items() if job is not None]
        assert real.collect() == []
        assert monotonic() < give_up
        sleep(0.005)
    process = psutil.Process(running[0].pid)
    other = real.submit(large(77), "b")
    while process.status() != psutil.STATUS_STOPPED:
        assert monotonic() < give_up
    answers = results_of(real, {other})
    assert isinstance(answers[other], Grammar) and expensive not in answers
    while process.status() == psutil.STATUS_STOPPED:
        assert monotonic() < give_up
    real.cancel(expensive)
    assert running[0] not in real._workers._jobs


def test_a_lowered_worker_runs_at_idle_priority_and_takes_no_other_jobs(real: CompilePool) -> None:
    real.watch_others(lambda tenant: True)
    results_of(real, {real.submit(Regex("a"), "a")})
    real._queue.charge("a", 2.5, monotonic())
    lowered = {real.submit(large(n), "a") for n in range(2)}
    results_of(real, lowered)
    (worker,) = [worker for worker in real._workers if worker.is_lowered]
    assert psutil.Process(worker.pid).nice() == 19
    if sys.platform == "linux":
        assert os.sched_getscheduler(worker.pid) == os.SCHED_IDLE
    give_up = monotonic() + PATIENCE_S
    while real._workers.num_idle < real._workers.size:  # another one takes its place
        assert monotonic() < give_up
        real.collect()
        sleep(0.005)
    tickets = {real.submit(large(n), "b") for n in range(2, 5)}
    assert real._workers._jobs[worker] is None
    results_of(real, tickets)
    assert worker in real._workers
    others = [other for other in real._workers if other is not worker]
    assert len(others) == real._workers.size
    assert not any(other.is_lowered for other in others)
    assert all(psutil.Process(other.pid).nice() < 19 for other in others if other.pid)


def test_a_worker_counts_the_processor_time_of_its_job(real: CompilePool) -> None:
    bomb = JsonSchema({"oneOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in (24, 25, 26)]})
    ticket, give_up = real.submit(bomb, "a"), monotonic() + PATIENCE_S
    (job,) = real._pending
    while not 0.3 < real._workers.cpu_seconds(job) < PATIENCE_S:
        assert monotonic() < give_up
        assert real.collect() == []
        sleep(0.005)
    real.cancel(ticket)
    assert real._queue._used.service("a", monotonic()) > 0.25


def test_a_template_that_dies_is_replaced(real: CompilePool) -> None:
    results_of(real, {real.submit(Regex("a"), "a")})
    template = real._workers._template
    assert template is not None
    os.kill(template.pid, signal.SIGKILL)
    for child in list(real._workers):
        if child.pid:
            os.kill(child.pid, signal.SIGKILL)
    give_up, number, answer = monotonic() + PATIENCE_S, count(1), None
    while not isinstance(answer, Grammar):  # the first ones may meet the dying workers
        assert monotonic() < give_up
        ticket = real.submit(Regex(f"b{{{next(number)}}}"), "a")
        answer = results_of(real, {ticket})[ticket]


@pytest.mark.parametrize("length", [400, 2000])
@pytest.mark.parametrize("keyword", ["$ref", "items", "contains"])
def test_a_long_chain_of_references_is_refused_and_the_worker_lives(
    real: CompilePool, length: int, keyword: str
) -> None:
    results_of(real, {real.submit(Regex("a"), "a")})

    def link(number: int) -> dict[str, object]:
        reference: dict[str, object] = {"$ref": f"#/$defs/d{number}"}
        return reference if keyword == "$ref" else {"type": "array", "maxItems": 2, keyword: reference}

    chain = {f"d{n}": link(n + 1) for n in range(length)} | {f"d{length}": {"type": "integer"}}
    ticket = real.submit(JsonSchema({"$ref": "#/$defs/d0", "$defs": chain}), "a")
    answer = results_of(real, {ticket})[ticket]
    assert isinstance(answer, GrammarError)
    assert answer.reason == "its references lead through too many schemas, one within another"
