"""Keeps a number of workers running: forks them ahead, ends those that are late, dead or grown, and replaces them."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from plait.constrained.compile_service.worker_messages import CompileResult, WorkerInit
from plait.constrained.compile_service.worker_process import TemplateProcess, WorkerProcess
from plait.constrained.specs import Spec

MAX_GROWTH_BYTES = 128 << 20  # a worker whose memory grew by more is replaced


class WorkerJob(Protocol):
    """gives_way: the job's worker is stopped when another job begins. is_stopped: it is. is_lowered: the worker takes
    only the processor time that nothing else wants. cpu_s: what is spent is added here when the job ends."""

    gives_way: bool
    is_stopped: bool
    is_lowered: bool
    cpu_s: float


Job = TypeVar("Job", bound=WorkerJob)


class JobFailure(Enum):
    """Why a job has no result."""

    LATE = auto()
    DIED = auto()


class WorkerSet(Generic[Job]):
    """At most `size` workers for one vocabulary, and the job that each one runs. No method blocks except `close`.

    A worker that runs a lowered job is kept for such jobs, since its priority cannot rise again, and another one takes
    its place. There is at most one of them that runs or is idle.

    >>> workers = WorkerSet[PendingSpec](init, size=2)                    # doctest: +SKIP
    >>> workers.maintain()                                                # doctest: +SKIP
    >>> workers.begin(pending, Regex("[0-9]+"), 2.0, 2.0)  # once a worker is ready            # doctest: +SKIP
    >>> workers.collect()                                                 # doctest: +SKIP
    [(pending, CompileResult(...))]
    """

    def __init__(self, init: WorkerInit, size: int) -> None:
        self.size = size
        self.num_failed_starts = 0  # since `take_failed_starts`
        self._init = init
        self._template: TemplateProcess | None = None
        self._ended_templates: list[TemplateProcess] = []  # not reaped yet
        self._jobs: dict[WorkerProcess, Job | None] = {}
        self._stopped: dict[WorkerProcess, WorkerProcess] = {}  # and the worker whose job took the place

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[Job]:
        """The jobs that run now and do not give way."""
        jobs = (job for job in self._jobs.values() if job is not None)
        return [job for job in jobs if not job.gives_way and not job.is_stopped]

    def filenos(self) -> list[int]:
        """Returns the descriptors that are readable when there is something to `collect`."""
        template = [self._template.connection.fileno()] if self._template is not None else []
        return template + [worker.connection.fileno() for worker in self._jobs]

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for space in a socket; call `collect` again soon."""
        is_unsent = self._template is not None and self._template.connection.has_unsent
        return is_unsent or any(worker.connection.has_unsent for worker in self._jobs)

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of a job or a start, in monotonic seconds."""
        deadlines = [worker.deadline for worker in self._jobs]
        if self._template is not None:
            deadlines.append(self._template.deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def maintain(self) -> None:
        """Starts what is missing: the template, then workers. A start that fails is counted.

        Stopped jobs go on whose place is free again.
        """
        for worker, other in list(self._stopped.items()):
            job = self._jobs[worker]
            if job is not None and self._jobs.get(other) is None:
                del self._stopped[worker]
                job.gives_way = job.is_stopped = False
                worker.send_signal(signal.SIGCONT)
        try:
            if self._template is None:
                self._template = TemplateProcess(self._init)
            while self._template.is_ready and sum(not worker.is_lowered for worker in self._jobs) < self.size:
                self._jobs[self._template.fork()] = None
        except OSError:
            self.num_failed_starts += 1

    def begin(self, job: Job, spec: Spec, limit_s: float, max_limit_s: float) -> None:
        """Gives a job to an idle worker, which must answer within `limit_s` seconds. There must be one.

        The deadline may be extended up to `max_limit_s`. Jobs that give way are stopped until this one has ended, but
        not for a lowered one.
        """
        worker = self._lowered_worker() if job.is_lowered else self._idle[0]
        assert worker is not None
        for other, running in self._jobs.items():
            if running is not None and running.gives_way and not running.is_stopped and not job.is_lowered:
                running.is_stopped = True
                self._stopped[other] = worker
                other.send_signal(signal.SIGSTOP)
        self._jobs[worker] = job
        worker.begin(spec, limit_s, max_limit_s, job.is_lowered)

    @property
    def num_idle(self) -> int:
        """Workers that are ready for a job that is not lowered."""
        return len(self._idle)

    @property
    def has_idle_for_lowered(self) -> bool:
        """Whether a worker is ready for a lowered job, and no such job runs."""
        return self._lowered_worker() is not None

    @property
    def _idle(self) -> list[WorkerProcess]:
        idle = (worker for worker, job in self._jobs.items() if worker.is_ready and job is None)
        return [worker for worker in idle if not worker.is_lowered]

    def _lowered_worker(self) -> WorkerProcess | None:
        """Returns the worker for the next lowered job: the one that is lowered already if there is one."""
        lowered = next((worker for worker in self._jobs if worker.is_lowered), None)
        if lowered is not None:
            return lowered if self._jobs[lowered] is None else None
        return next(iter(self._idle), None)

    def cpu_seconds(self, job: Job) -> float:
        """Returns the CPU seconds that a running job has used; infinity if that is not known."""
        return next((worker.job_cpu_seconds() for worker, running in self._jobs.items() if running is job), math.inf)

    def extend(self, job: Job, until: float) -> None:
        """Moves the deadline of a running job to `until` (monotonic seconds)."""
        for worker, running in self._jobs.items():
            if running is job:
                worker.deadline = until

    def end(self, job: Job) -> None:
        """Kills the worker that runs `job`, if one does."""
        for worker in [worker for worker, running in self._jobs.items() if running is job]:
            self._end_worker(worker)

    def collect(self) -> list[tuple[Job, CompileResult | JobFailure]]:
        """Returns the jobs that have ended, and those that are late, which the caller must `end` or `extend`.

        Workers that have died or grown are replaced.
        """
        ended: list[tuple[Job, CompileResult | JobFailure]] = []
        self._check_template()
        for worker in list(self._jobs):
            worker.connection.flush()
            is_grown = False
            for message in worker.receive():
                job = self._jobs[worker]
                if isinstance(message, CompileResult) and job is not None:
                    _note_cpu_s(worker, job)
                    self._jobs[worker] = None
                    ended.append((job, message))
                    is_grown = worker.growth_bytes() > MAX_GROWTH_BYTES
            job = self._jobs[worker]
            if worker.connection.is_dead or (worker.is_past_deadline() and job is None):
                if job is not None:
                    ended.append((job, JobFailure.DIED))
                self.num_failed_starts += not worker.is_ready
                self._end_worker(worker)
            elif job is not None and worker.is_past_deadline():
                ended.append((job, JobFailure.LATE))
            elif is_grown:
                self._end_worker(worker)
        return ended

    def take_failed_starts(self) -> int:
        """Returns how many starts have failed since the last call."""
        count, self.num_failed_starts = self.num_failed_starts, 0
        return count

    def close(self) -> None:
        """Ends all processes and waits for them, at most some seconds."""
        for worker in list(self._jobs):
            self._end_worker(worker)
        if self._template is not None:
            self._ended_templates.append(self._template)
            self._template = None
        for template in self._ended_templates:
            template.end()
        self._ended_templates.clear()

    def _check_template(self) -> None:
        """Reads from the template; one that has failed is dropped, and its idle workers with it."""
        self._ended_templates = [template for template in self._ended_templates if not template.has_exited()]
        if self._template is None:
            return
        self._template.receive()
        if self._template.is_failed:
            self.num_failed_starts += not self._template.is_ready
            self._template.kill()
            self._ended_templates.append(self._template)
            self._template = None

    def _end_worker(self, worker: WorkerProcess) -> None:
        job = self._jobs.pop(worker)
        if job is not None:
            _note_cpu_s(worker, job)
        self._stopped.pop(worker, None)
        worker.kill()
        if self._template is not None:
            self._template.reap(worker)


def _note_cpu_s(worker: WorkerProcess, job: WorkerJob) -> None:
    spent_s = worker.job_cpu_seconds()
    job.cpu_s += spent_s if math.isfinite(spent_s) else 0.0
