"""The template process and its workers as the pool sees them. No method blocks, except `TemplateProcess.end`."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import socket
from pathlib import Path
from time import monotonic

from plait.constrained.compile_service.frame_connection import FrameConnection
from plait.constrained.compile_service.worker_messages import (
    CompileJob,
    FromWorker,
    WorkerInit,
    WorkerReady,
    send_fork,
    send_reap,
)
from plait.constrained.specs import Spec
from plait.host.child_process import ChildProcess

START_LIMIT_S = 20.0
_SELF_END_S = 1.0  # a worker ends itself so long after its deadline, if the pool has not ended it
_END_TIMEOUT_S = 5.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorkerProcess:
    """A worker; `deadline` is when it must have answered (monotonic seconds), None while it is idle.

    `pid` is 0 until the worker has reported that it is ready.
    """

    def __init__(self, connection: FrameConnection) -> None:
        self.connection = connection
        self.pid = 0
        self.ready_bytes = 0  # resident memory when it became ready
        self.is_lowered = False  # whether it has had a lowered job
        self._cpu_at_begin = 0.0
        self.deadline: float | None = monotonic() + START_LIMIT_S

    @property
    def is_ready(self) -> bool:
        return bool(self.pid)

    def resident_bytes(self) -> int:
        """Returns the resident memory of the process in bytes; 0 if the system does not report it."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        except (OSError, IndexError):
            return 0

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds that the process and its children have used; infinity if the system does not report
        them."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError):
            return math.inf

    def job_cpu_seconds(self) -> float:
        """Returns the CPU seconds that the process has used since `begin`; infinity if that is not known."""
        used = self.cpu_seconds()
        return used - self._cpu_at_begin if math.isfinite(used) else math.inf

    def growth_bytes(self) -> int:
        """Returns by how much the resident memory has grown since the worker became ready."""
        return self.resident_bytes() - self.ready_bytes

    def begin(self, spec: Spec, limit_s: float, max_limit_s: float, is_lowered: bool) -> None:
        """Sends a job, which must be answered within `limit_s` seconds; `deadline` may be moved up to `max_limit_s`."""
        self.deadline = monotonic() + limit_s
        self.is_lowered = self.is_lowered or is_lowered
        self._cpu_at_begin = self.cpu_seconds()
        self.connection.send(CompileJob(spec, max_limit_s + _SELF_END_S, is_lowered))

    def is_past_deadline(self) -> bool:
        return self.deadline is not None and monotonic() >= self.deadline

    def receive(self) -> list[FromWorker]:
        """Returns the messages that are complete; the first one, WorkerReady, also sets `pid`."""
        messages = self.connection.receive()
        for message in messages:
            self.deadline = None
            if isinstance(message, WorkerReady):
                self.pid = message.pid
                self.ready_bytes = self.resident_bytes()
        return messages

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children, such as those that stop it and let it go on."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kills the process with its children. A worker that is not ready ends when it finds its socket closed."""
        self.connection.close()
        self.send_signal(signal.SIGKILL)


class TemplateProcess:
    """The process that forks the workers. Raises OSError if it cannot be started.

    >>> template = TemplateProcess(WorkerInit([b"", b"a"], [0], 2 << 30))  # doctest: +SKIP
    >>> template.receive()  # after a while                               # doctest: +SKIP
    >>> worker = template.fork()                                          # doctest: +SKIP
    """

    def __init__(self, init: WorkerInit) -> None:
        # Not a new session: Linux shares CPU time between sessions whatever their niceness.
        module, environment = "plait.constrained.compile_service.worker_template", {**os.environ, **_ONE_THREAD}
        self._process = ChildProcess(module, channel=True, env=environment, process_group=0)
        assert self._process.channel is not None
        self.connection = FrameConnection(self._process.channel)
        self.is_ready = False
        self.deadline: float | None = monotonic() + START_LIMIT_S
        self.connection.send(init)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_failed(self) -> bool:
        """Whether the process has ended, or did not become ready in time."""
        return self.connection.is_dead or (self.deadline is not None and monotonic() >= self.deadline)

    def receive(self) -> None:
        """Notes that the process is ready, or that it has ended."""
        self.connection.flush()
        if self.connection.receive():
            self.is_ready, self.deadline = True, None

    def fork(self) -> WorkerProcess:
        """Requests a worker, which will report that it is ready. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                send_fork(self.connection.socket, theirs)
            except OSError:
                ours.close()
                raise
        return WorkerProcess(FrameConnection(ours))

    def reap(self, worker: WorkerProcess) -> None:
        """Lets the process id of a killed worker be used again."""
        if worker.pid:
            with contextlib.suppress(OSError):  # the template has ended, and its workers belong to init
                send_reap(self.connection.socket, worker.pid)

    def kill(self) -> None:
        """Kills the process, but not its workers."""
        self.connection.close()
        self._process.kill()

    def has_exited(self) -> bool:
        """Returns whether the process has ended and was reaped."""
        return self._process.status() is not None

    def end(self) -> None:
        """Closes the socket, upon which the process ends its workers and itself; kills it after five seconds."""
        self.connection.close()
        self._process.end(_END_TIMEOUT_S)
